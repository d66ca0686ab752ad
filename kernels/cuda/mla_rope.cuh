// What the kernels that make the absorbed query share: their parameters, the rotation of pairs, and how a
// product's tile of 16 columns and 8 rows is stored.
#pragma once

#include "kdt/kernels/mla_absorb.h"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/types.cuh"

namespace kdt::cuda {

struct AbsorbedQuery {
  bf16* q;
  const bf16* w;
  bf16* out;
  int64_t q_stride, out_stride;
  int rows, nope, rope, v, latent;
  const int32_t* positions;
  const float* inv_freq;
  float attention_factor;
};

inline AbsorbedQuery MakeAbsorbedQuery(const kernels::AbsorbQueryArgs& args) {
  AbsorbedQuery p;
  p.q = Data<bf16>(args.q);
  p.w = reinterpret_cast<const bf16*>(args.w_kv_b);
  p.out = Data<bf16>(args.out);
  p.q_stride = args.q.stride;
  p.out_stride = args.out.stride;
  p.rows = static_cast<int>(args.q.rows);
  p.nope = static_cast<int>(args.nope);
  p.rope = static_cast<int>(args.rope);
  p.v = static_cast<int>(args.v);
  p.latent = static_cast<int>(args.latent);
  p.positions = args.positions;
  p.inv_freq = args.inv_freq;
  p.attention_factor = args.attention_factor;
  return p;
}

// (cos, sin)
__device__ __forceinline__ float2 AngleOf(int32_t position, float frequency, float attention_factor) {
  float sin, cos;
  sincosf(static_cast<float>(position) * frequency, &sin, &cos);
  return make_float2(cos * attention_factor, sin * attention_factor);
}
__device__ __forceinline__ float2 AngleOf(const AbsorbedQuery& p, int row, int pair) {
  return AngleOf(p.positions[row], p.inv_freq[pair], p.attention_factor);
}

__device__ __forceinline__ uint32_t Rotated(uint32_t bits, float2 angle) {
  const float a = LowBf16(bits), b = HighBf16(bits);
  return PackBf16(a * angle.x - b * angle.y, b * angle.x + a * angle.y);
}
__device__ __forceinline__ void Rotate(const bf16* from, bf16* to, float2 angle) {
  *reinterpret_cast<uint32_t*>(to) = Rotated(__ldcg(reinterpret_cast<const uint32_t*>(from)), angle);
}
// Where pair `pair` of a head's rope part goes.
__device__ __forceinline__ bf16* RopeOut(const AbsorbedQuery& p, int head, int row, int pair) {
  return p.out + row * p.out_stride + static_cast<int64_t>(head) * (p.latent + p.rope) + p.latent + 2 * pair;
}
__device__ __forceinline__ void RotatePair(const AbsorbedQuery& p, int head, int row, int pair,
                                           float2 angle) {
  Rotate(p.q + row * p.q_stride + static_cast<int64_t>(head) * (p.nope + p.rope) + p.nope + 2 * pair,
         RopeOut(p, head, row, pair), angle);
}

// A warp's products: acc[c] is row 2 t + (c & 1) of first_row .., column 8 (c >> 1) + g of first_column .. .
// Neighbours along the columns swap rows, so that a lane stores two columns of one row.
__device__ __forceinline__ void StoreAbsorbed(const AbsorbedQuery& p, const float (&acc)[4], int head,
                                              int first_row, int first_column, int lane) {
  const int g = lane >> 2, t = lane & 3;
  const bool odd = (g & 1) != 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Chosen by value: an index would put acc into local memory.
    const float even_row = acc[2 * half], odd_row = acc[2 * half + 1];
    const float mine = odd ? odd_row : even_row;
    const float other = __shfl_xor_sync(~0u, odd ? even_row : odd_row, 4);
    const int row = first_row + 2 * t + odd, column = first_column + 8 * half + (g & ~1);
    if (row >= p.rows) continue;
    bf16* to = p.out + row * p.out_stride + static_cast<int64_t>(head) * (p.latent + p.rope) + column;
    *reinterpret_cast<uint32_t*>(to) = odd ? PackBf16(other, mine) : PackBf16(mine, other);
  }
}

}  // namespace kdt::cuda
