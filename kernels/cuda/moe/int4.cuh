// INT4 weights as A operands of m16n8k16.
//
// Four groups of 32 inputs (128 inputs) are one unit: lane (g, t) loads the 16 bytes of group t of row g, and
// a transposition within the four lanes of a row gives it word t of each group. The eight inputs of that
// word, 8 t .. 8 t + 7, are paired as (i, i + 4), because one mask takes both out of a word: x is read in the
// same pairs. The products of a group are summed on integers q (exact in bf16) and scaled in float32.
#pragma once

#include "kernels/cuda/common/ptx.cuh"

namespace kdt::cuda {

inline constexpr int kUnit = 128;  // inputs

// in[j] of lane t is word j of group t; afterwards v[j] is word t of group j.
__device__ __forceinline__ void TransposeQuad(uint32_t (&v)[4], int t) {
  const bool odd = (t & 1) != 0, high = (t & 2) != 0;
  const uint32_t a = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 1),
                 b = __shfl_xor_sync(~0u, odd ? v[2] : v[3], 1);
  if (odd) {
    v[0] = a, v[2] = b;
  } else {
    v[1] = a, v[3] = b;
  }
  const uint32_t c = __shfl_xor_sync(~0u, high ? v[0] : v[2], 2),
                 d = __shfl_xor_sync(~0u, high ? v[1] : v[3], 2);
  if (high) {
    v[0] = c, v[1] = d;
  } else {
    v[2] = c, v[3] = d;
  }
}

// q - 8 of inputs (i, i + 4), i = 0 .. 3, as bf16 pairs: 128 + q is 0x4300 | q in bf16.
__device__ __forceinline__ void Expand(uint32_t word, uint32_t (&pairs)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t biased = (word >> (4 * i) & 0x000f000fu) | 0x43004300u;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(pairs[i]) : "r"(biased), "r"(0x43084308u));  // 136
  }
}

// The same pairs of eight consecutive bf16 inputs.
__device__ __forceinline__ void PairInputs(const uint4& x, uint32_t (&pairs)[4]) {
  pairs[0] = __byte_perm(x.x, x.z, 0x5410);
  pairs[1] = __byte_perm(x.x, x.z, 0x7632);
  pairs[2] = __byte_perm(x.y, x.w, 0x5410);
  pairs[3] = __byte_perm(x.y, x.w, 0x7632);
}

// A lane's part of 16 weight rows for one unit: rows g and g + 8.
struct Int4Unit {
  uint32_t words[2][4];
  uint32_t scales[2][2];  // four bf16 a row
};

__device__ __forceinline__ void LoadUnit(Int4Unit& u, const uint32_t* const (&rows)[2],
                                         const uint16_t* const (&scales)[2], int unit, int groups, int t) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint4 v = make_uint4(0, 0, 0, 0);
    uint2 s = make_uint2(0, 0);
    if (unit * 4 + t < groups) v = __ldcs(reinterpret_cast<const uint4*>(rows[i] + (unit * 4 + t) * 4));
    if (groups % 4 == 0) {
      if (unit * 4 < groups) s = __ldcs(reinterpret_cast<const uint2*>(scales[i] + unit * 4));
    } else {
      uint16_t one[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) one[j] = unit * 4 + j < groups ? scales[i][unit * 4 + j] : 0;
      s = make_uint2(one[0] | static_cast<uint32_t>(one[1]) << 16, one[2] | static_cast<uint32_t>(one[3])
                                                                                << 16);
    }
    u.words[i][0] = v.x, u.words[i][1] = v.y, u.words[i][2] = v.z, u.words[i][3] = v.w;
    u.scales[i][0] = s.x, u.scales[i][1] = s.y;
  }
}

// acc += W x over a unit; x gives the four groups' inputs 8 t .. 8 t + 7 of column g. Words must be
// transposed.
__device__ __forceinline__ void MultiplyUnit(float (&acc)[4], const Int4Unit& u, const uint4 (&x)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t low[4], high[4], b[4];
    Expand(u.words[0][j], low);
    Expand(u.words[1][j], high);
    PairInputs(x[j], b);
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const uint32_t first[4] = {low[0], high[0], low[1], high[1]},
                   second[4] = {low[2], high[2], low[3], high[3]};
    MmaBf16(sum, first, b[0], b[1]);
    MmaBf16(sum, second, b[2], b[3]);
    const float s0 = j & 1 ? HighBf16(u.scales[0][j >> 1]) : LowBf16(u.scales[0][j >> 1]);
    const float s1 = j & 1 ? HighBf16(u.scales[1][j >> 1]) : LowBf16(u.scales[1][j >> 1]);
    acc[0] += s0 * sum[0], acc[1] += s0 * sum[1], acc[2] += s1 * sum[2], acc[3] += s1 * sum[3];
  }
}

}  // namespace kdt::cuda
