// INT4 weights as A operands of m16n8k16 in float16.
//
// Four groups of 32 inputs (128 inputs) are one unit: lane (g, t) loads the 16 bytes of group t of row g, and
// a transposition within the four lanes of a row gives it word t of each group. A word holds inputs 8 t .. 8
// t + 7; they are used in pairs (i, i + 4), because one mask takes both out of the word:
//   i = 0, 2:  word & 0x000f000f | 0x6400 in both halves is 1024 + q in float16
//   i = 1, 3:  word & 0x00f000f0 | 0x6400 in both halves is 1024 + 16 q, and its input comes divided by 16
// so a word costs five integer operations. The wanted weight is q - 8; what is too much, 1032 x and 1152 (x /
// 16), does not depend on the weights: a product with a constant A operand gives it once for all rows, as the
// start of their sums. The sums of a group, exact up to float32 rounding, are then scaled in float32.
#pragma once

#include "kernels/cuda/common/ptx.cuh"

namespace kdt::cuda {

inline constexpr int kUnit = 128;  // inputs

// in[j] of lane t is word j of group t; afterwards v[j] is word t of group j.
__device__ __forceinline__ void TransposeQuad(uint32_t (&v)[4], int t) {
  const bool odd = (t & 1) != 0, high = (t & 2) != 0;
  const uint32_t a = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 1);
  const uint32_t b = __shfl_xor_sync(~0u, odd ? v[2] : v[3], 1);
  v[0] = odd ? a : v[0], v[1] = odd ? v[1] : a, v[2] = odd ? b : v[2], v[3] = odd ? v[3] : b;
  const uint32_t c = __shfl_xor_sync(~0u, high ? v[0] : v[2], 2);
  const uint32_t d = __shfl_xor_sync(~0u, high ? v[1] : v[3], 2);
  const uint32_t low0 = v[0], low1 = v[1];
  v[0] = high ? c : low0, v[1] = high ? d : low1, v[2] = high ? v[2] : c, v[3] = high ? v[3] : d;
}

__device__ __forceinline__ void Expand(uint32_t word, uint32_t (&pairs)[4]) {
  const uint32_t next = word >> 8;
  pairs[0] = (word & 0x000f000fu) | 0x64006400u;
  pairs[1] = (word & 0x00f000f0u) | 0x64006400u;
  pairs[2] = (next & 0x000f000fu) | 0x64006400u;
  pairs[3] = (next & 0x00f000f0u) | 0x64006400u;
}

// Eight bf16 inputs, times a power of two that brings them into float16's range, as the pairs above.
__device__ __forceinline__ uint4 PairInputs(const uint4& x, float scale) {
  const float small = scale * 0.0625f;
  uint4 pairs;
  pairs.x = PackHalf(LowBf16(x.x) * scale, LowBf16(x.z) * scale);
  pairs.y = PackHalf(HighBf16(x.x) * small, HighBf16(x.z) * small);
  pairs.z = PackHalf(LowBf16(x.y) * scale, LowBf16(x.w) * scale);
  pairs.w = PackHalf(HighBf16(x.y) * small, HighBf16(x.w) * small);
  return pairs;
}
__device__ __forceinline__ float LargestOf(const uint4& x) {
  float top = 0.0f;
  const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) top = fmaxf(top, fmaxf(fabsf(LowBf16(words[i])), fabsf(HighBf16(words[i]))));
  return top;
}
// The power of two that brings `top` into [128, 256): products with 1024 stay far from float32's and
// float16's ends.
__device__ __forceinline__ float InputScale(float top) {
  const int exponent = min(max(static_cast<int>(__float_as_uint(top) >> 23), 30), 250);
  return __uint_as_float(static_cast<uint32_t>(261 - exponent) << 23);
}

// d = a b + c, m16n8k16, float16 in, float32 out.
__device__ __forceinline__ void MmaHalf(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                        const float (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]),
        "f"(c[3]));
}

// A lane's part of 16 weight rows for one unit: rows g and g + 8.
struct Int4Unit {
  uint32_t words[2][4];
  uint32_t scales[2][2];  // four bf16 a row
};

// `words` and `scales` are those of row g, the rows lie `groups` groups apart. Groups past the end give zero
// scales. kWhole: the number of groups is a multiple of four.
template <bool kWhole>
__device__ __forceinline__ void LoadUnit(Int4Unit& u, const uint32_t* words, const uint16_t* scales, int unit,
                                         int groups, int t) {
  if (kWhole && unit * 4 >= groups) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4* from = reinterpret_cast<const uint4*>(words) + 8 * i * groups + unit * 4 + t;
    const uint16_t* row = scales + 8 * i * groups + unit * 4;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (kWhole) {
      v = __ldcs(from);
      const uint2 s = __ldg(reinterpret_cast<const uint2*>(row));
      u.scales[i][0] = s.x, u.scales[i][1] = s.y;
    } else {
      if (unit * 4 + t < groups) v = __ldcs(from);
      uint16_t one[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) one[j] = unit * 4 + j < groups ? row[j] : 0;
      u.scales[i][0] = one[0] | static_cast<uint32_t>(one[1]) << 16;
      u.scales[i][1] = one[2] | static_cast<uint32_t>(one[3]) << 16;
    }
    u.words[i][0] = v.x, u.words[i][1] = v.y, u.words[i][2] = v.z, u.words[i][3] = v.w;
  }
}

// acc[m] += W[m] x over a unit, for tiles of weight rows that share x: four groups' inputs 8 t .. 8 t + 7 of
// column g.
template <int kTiles>
__device__ __forceinline__ void MultiplyUnit(float (&acc)[kTiles][4], Int4Unit (&u)[kTiles],
                                             const uint4 (&x)[4], int t) {
  const uint32_t surplus[4] = {0xe408e408u, 0xe408e408u, 0xe480e480u, 0xe480e480u};  // -1032, -1152
  const float zero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
    TransposeQuad(u[m].words[0], t);
    TransposeQuad(u[m].words[1], t);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float start[4];
    MmaHalf(start, surplus, x[j].x, x[j].y, zero);
    MmaHalf(start, surplus, x[j].z, x[j].w, start);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      uint32_t low[4], high[4];
      Expand(u[m].words[0][j], low);
      Expand(u[m].words[1][j], high);
      const uint32_t first[4] = {low[0], high[0], low[1], high[1]},
                     second[4] = {low[2], high[2], low[3], high[3]};
      float sum[4];
      MmaHalf(sum, first, x[j].x, x[j].y, start);
      MmaHalf(sum, second, x[j].z, x[j].w, sum);
      const float s0 = j & 1 ? HighBf16(u[m].scales[0][j >> 1]) : LowBf16(u[m].scales[0][j >> 1]);
      const float s1 = j & 1 ? HighBf16(u[m].scales[1][j >> 1]) : LowBf16(u[m].scales[1][j >> 1]);
      acc[m][0] += s0 * sum[0], acc[m][1] += s0 * sum[1], acc[m][2] += s1 * sum[2], acc[m][3] += s1 * sum[3];
    }
  }
}

}  // namespace kdt::cuda
