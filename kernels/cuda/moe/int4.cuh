// INT4 weights as A operands of m16n8k16 in bfloat16.
//
// Weights lie in *units*: 32 weight rows times 128 inputs, four groups of 32 inputs behind each other. Of a
// group, lane (g, t) has 16 bytes: one word (its inputs 8 t .. 8 t + 7) of each of the rows g, g + 8, g + 16,
// g + 24. Within a word nibble i holds input 2 i and nibble i + 4 input 2 i + 1, so that one mask takes out a
// pair that stands in the order in which x lies in memory: (word >> 4 i) & 0x000f000f | 0x4300 in both halves
// is 128 + q in bfloat16, seven integer operations for eight weights. The wanted weight is q - 8; what is too
// much, 136 x, does not depend on the weights: a product with a constant A operand gives it once for all
// rows, as the start of their sums. The sums of a group, exact up to float32 rounding, are then scaled in
// float32. The inputs go in as they are.
#pragma once

#include "kernels/cuda/common/ptx.cuh"

namespace kdt::cuda {

inline constexpr int kUnitRows = 32;
inline constexpr int kUnitGroups = 4;
inline constexpr int kGroupBytes = 512;      // weights of a group of a unit
inline constexpr int kGroupScaleBytes = 64;  // [8][4] bf16: rows g, g + 8, g + 16, g + 24
inline constexpr int kUnitWeightBytes = kUnitGroups * kGroupBytes;      // 2048
inline constexpr int kUnitScaleBytes = kUnitGroups * kGroupScaleBytes;  // 256
inline constexpr int kUnitBytes = kUnitWeightBytes + kUnitScaleBytes;

__device__ __forceinline__ void Expand(uint32_t word, uint32_t (&pairs)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // (word & mask) | magic in one operation, which the compiler does not find by itself.
    asm("lop3.b32 %0, %1, %2, %3, 0xea;"
        : "=r"(pairs[i])
        : "r"(word >> (4 * i)), "n"(0x000f000f), "r"(0x43004300u));
  }
}

// d = a b + c
__device__ __forceinline__ void MmaBf16From(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                            const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]),
        "f"(c[3]));
}

// The constant operand, -136 everywhere, in registers of its own. It comes from shared memory, because the
// compiler makes a constant it knows anew for every unit.
inline constexpr uint32_t kSurplus = 0xc308c308u;
struct Surplus {
  uint32_t a[4];
  __device__ __forceinline__ explicit Surplus(const uint4* shared) {
    const uint4 v = LoadShared4U(SharedAddress(shared));
    a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
  }
};

// acc[m] += W[m] x for 16-row halves m and eight columns x, over kGroups groups of a unit in shared memory
// (weights at a lane's 16 bytes, scales at row g's 8). x[j] is inputs 8 t .. 8 t + 7 of column g. The chains
// of products of several groups have to run side by side: one chain takes four times a product's latency.
template <int kGroups>
__device__ __forceinline__ void MultiplyGroups(float (&acc)[2][4], const unsigned char* weights,
                                               const unsigned char* scales, const uint4* x,
                                               const Surplus& surplus) {
  const float zero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  float start[kGroups][4];
#pragma unroll
  for (int j = 0; j < kGroups; ++j) MmaBf16From(start[j], surplus.a, x[j].x, x[j].y, zero);
#pragma unroll
  for (int j = 0; j < kGroups; ++j) MmaBf16From(start[j], surplus.a, x[j].z, x[j].w, start[j]);
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    const uint4 words = *reinterpret_cast<const uint4*>(weights + j * kGroupBytes);
    const uint2 s = *reinterpret_cast<const uint2*>(scales + j * kGroupScaleBytes);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      uint32_t low[4], high[4];
      Expand(m == 0 ? words.x : words.z, low);
      Expand(m == 0 ? words.y : words.w, high);
      const uint32_t first[4] = {low[0], high[0], low[1], high[1]},
                     second[4] = {low[2], high[2], low[3], high[3]};
      const float s0 = LowBf16(m == 0 ? s.x : s.y), s1 = HighBf16(m == 0 ? s.x : s.y);
      float sum[4];
      MmaBf16From(sum, first, x[j].x, x[j].y, start[j]);
      MmaBf16From(sum, second, x[j].z, x[j].w, sum);
      acc[m][0] = fmaf(s0, sum[0], acc[m][0]), acc[m][1] = fmaf(s0, sum[1], acc[m][1]);
      acc[m][2] = fmaf(s1, sum[2], acc[m][2]), acc[m][3] = fmaf(s1, sum[3], acc[m][3]);
    }
  }
}

}  // namespace kdt::cuda
