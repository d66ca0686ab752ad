// What both forms of value warp do with 128 columns of their rows: products of a round, factors, and at
// the end the result or a partial of it.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/verify_attention/plan.cuh"

namespace kdt::cuda {

// Adds what eighth j of the columns gets: both parts times the same fragments of V.
template <int kMTiles>
__device__ __forceinline__ void AddProducts(float (&o)[kMTiles][16][4], const uint32_t (&a)[2][kMTiles][4],
                                            const uint32_t (&b)[4], int j) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      MmaBf16(o[m][2 * j], a[i][m], b[0], b[1]);
      MmaBf16(o[m][2 * j + 1], a[i][m], b[2], b[3]);
    }
  }
}

// Brings the rows of eight d to their references of now.
template <int kMTiles>
__device__ __forceinline__ void Rescale(float (&o)[kMTiles][16][4], int d, float factor) {
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    o[d >> 1][n][2 * (d & 1)] *= factor;
    o[d >> 1][n][2 * (d & 1) + 1] *= factor;
  }
}

// What a row's outputs are multiplied by in the end; 0 where it saw no key, NaN stays.
__device__ __forceinline__ float InverseOf(float sum) { return sum > 0.0f || sum != sum ? 1.0f / sum : 0.0f; }

// The rows' results. `inverses`: in shared memory, what each row of the group is multiplied by.
template <class C>
__device__ __forceinline__ void StoreResult(const VerifyParams& p, const Item& it, uint32_t inverses,
                                            int group, int w, const float (&o)[C::kMTiles][16][4]) {
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  const int first_flat = it.tile * C::kTileRows + group * C::kGroupRows;
#pragma unroll
  for (int d = 0; d < 2 * C::kMTiles; ++d) {
    const int flat = first_flat + 8 * d + g;
    if (flat >= it.rows * p.heads) continue;
    const float inverse = LoadShared(inverses + (8 * d + g) * 4);
    const int row = RowOf(p, flat);
    uint16_t* to =
        p.out + (it.row0 + row) * p.out_stride + (flat - row * p.heads) * kLatent + 128 * w + 2 * t;
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      *reinterpret_cast<uint32_t*>(to + 8 * n) =
          PackBf16(o[d >> 1][n][2 * (d & 1)] * inverse, o[d >> 1][n][2 * (d & 1) + 1] * inverse);
    }
  }
}

// The upper 24 bits of the values, without references and sums.
template <class C>
__device__ __forceinline__ void StorePartial(const VerifyParams& p, const VerifyClass& out, const Item& it,
                                             int group, int w, const float (&o)[C::kMTiles][16][4]) {
  const int first_flat = it.tile * C::kTileRows + group * C::kGroupRows;
  const int64_t first =
      (static_cast<int64_t>(blockIdx.x) * C::kTileRows + (group * 4 + w) * 4 * C::kMTiles) * 64 +
      (threadIdx.x & 31);
  uint4* const high = out.partial + first;
  uint2* const low = out.partial_low + first;
#pragma unroll
  for (int d = 0; d < 2 * C::kMTiles; ++d) {
    if (first_flat + 8 * d >= it.rows * p.heads) break;
    const int m = d >> 1, c = 2 * (d & 1);
#pragma unroll
    for (int n4 = 0; n4 < 4; ++n4) {
      uint32_t x[8], h[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        x[2 * k] = __float_as_uint(o[m][4 * n4 + k][c]);
        x[2 * k + 1] = __float_as_uint(o[m][4 * n4 + k][c + 1]);
        h[k] = __byte_perm(x[2 * k], x[2 * k + 1], 0x7632);
      }
      high[(d * 4 + n4) * 32] = make_uint4(h[0], h[1], h[2], h[3]);
      // The next eight bits of each value; the last eight are dropped.
      const auto third_bytes = [](const uint32_t* v) {
        return __byte_perm(__byte_perm(v[0], v[1], 0x0051), __byte_perm(v[2], v[3], 0x0051), 0x5410);
      };
      low[(d * 4 + n4) * 32] = make_uint2(third_bytes(x), third_bytes(x + 4));
    }
  }
}

}  // namespace kdt::cuda
