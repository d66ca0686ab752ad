// INT4 weights as A operands of m16n8k16 in bfloat16.
//
// Weights lie tile by tile: 32 weight rows, their groups of 32 inputs behind each other. Of a group, lane
// (g, t) has 16 bytes: one word (its inputs 8 t .. 8 t + 7) of each of the rows g, g + 8, g + 16, g + 24.
// Within a word nibble i holds input 2 i and nibble i + 4 input 2 i + 1, so that one mask takes out a pair
// that stands in the order in which x lies in memory. What is taken out is q times a power of two; the wanted
// weight is q - 8, and what is too much, 8 x, does not depend on the weights: a product with a constant A
// operand gives it once for all rows, as the start of their sums. The sums of a group, exact up to float32
// rounding, are then scaled in float32.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/types.cuh"

namespace kdt::cuda {

inline constexpr int kTileRows = 32;
inline constexpr int kGroupBytes = 512;      // weights of a group of a tile
inline constexpr int kGroupScaleBytes = 64;  // [8][4] bf16: rows g, g + 8, g + 16, g + 24

// A bfloat16 with the sign and all bits of the exponent but the lowest clear is its other eight bits times
// 2^-133. So nibbles 0 and 2 of a half are taken out as q 2^-133, nibbles 1 and 3 as 16 q 2^-133, by one
// operation each; the inputs make good for the factors, and kUnscale for what is left.
__device__ __forceinline__ void Expand(uint32_t word, uint32_t (&pairs)[4]) {
  pairs[0] = word & 0x000f000fu;
  pairs[1] = word & 0x00f000f0u;
  word >>= 8;
  pairs[2] = word & 0x000f000fu;
  pairs[3] = word & 0x00f000f0u;
}
inline constexpr float kUnscale = 0x1p69f;
// Eight inputs, times 2^64 for nibbles 0 and 2, 2^60 for 1 and 3.
__device__ __forceinline__ uint4 ScaledInputs(const uint4& x) {
  constexpr uint32_t kLow = 0x5f805f80u, kHigh = 0x5d805d80u;
  return make_uint4(MulBf16x2(x.x, kLow), MulBf16x2(x.y, kHigh), MulBf16x2(x.z, kLow), MulBf16x2(x.w, kHigh));
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

__device__ __forceinline__ uint2 LoadShared2U(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}

// The constant operand, -136 everywhere, in registers of its own. It comes from shared memory, because the
// compiler makes a constant it knows anew for every unit.
inline constexpr uint32_t kSurplusLow = 0x80088008u, kSurplusHigh = 0x80808080u;  // -8 and -128, times 2^-133
struct Surplus {
  uint32_t a[4];
  __device__ __forceinline__ explicit Surplus(const uint4* shared) {
    const uint4 v = LoadShared4U(SharedAddress(shared));
    a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
  }
};

// Where a lane finds the first of its 16 bytes of a run of groups: of weights its share of the first group,
// of scales the lane-th piece.
struct Position {
  const char* weights = nullptr;
  const char* scales = nullptr;

  __device__ __forceinline__ Position Groups(int n) const {
    return {weights + n * kGroupBytes, scales + n * kGroupScaleBytes};
  }
};

// 16 bytes from global to shared memory past L1, or zeros.
__device__ __forceinline__ void CopyAsync16OrZero(uint32_t dst, const void* src, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(there ? 16 : 0)
               : "memory");
}

// A warp's place in shared memory for up to four groups of weights on their way.
inline constexpr int kSlotGroups = 4;
inline constexpr int kSlotBytes = kSlotGroups * (kGroupBytes + kGroupScaleBytes);

// Sends for groups: with kAll there are at least kSure, else what is not there becomes zero.
template <int kSure, bool kAll>
__device__ __forceinline__ void SendGroups(uint32_t slot, const Position& from, int groups, int lane) {
  const uint32_t to = slot + lane * 16;
#pragma unroll
  for (int j = 0; j < kSlotGroups; ++j) {
    if (kAll) {
      if (j < kSure || j < groups) CopyAsync16(to + j * kGroupBytes, from.weights + j * kGroupBytes);
    } else {
      CopyAsync16OrZero(to + j * kGroupBytes, from.weights + j * kGroupBytes, j < groups);
    }
  }
  const uint32_t scales = to + kSlotGroups * kGroupBytes;
  if (kAll) {
    if (lane < (kSure == kSlotGroups ? kSure : groups) * (kGroupScaleBytes / 16))
      CopyAsync16(scales, from.scales);
  } else if (lane < kSlotGroups * (kGroupScaleBytes / 16)) {
    CopyAsync16OrZero(scales, from.scales, lane < groups * (kGroupScaleBytes / 16));
  }
}

// A lane's share of up to four groups of weights, in registers.
struct Weights {
  uint4 words[kSlotGroups];
  uint2 scales[kSlotGroups];

  template <int kGroups>
  __device__ __forceinline__ void Take(uint32_t slot, int lane) {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) words[j] = LoadShared4U(slot + j * kGroupBytes + lane * 16);
#pragma unroll
    for (int j = 0; j < kGroups; ++j)
      scales[j] = LoadShared2U(slot + kSlotGroups * kGroupBytes + j * kGroupScaleBytes + (lane >> 2) * 8);
  }
};

// A lane's share of the inputs of up to four groups: inputs 8 t .. 8 t + 7 of column g, where x points. They
// are asked for before a warp waits for its weights.
struct Inputs {
  uint4 of[kSlotGroups];

  template <int kGroups, bool kAll>
  __device__ __forceinline__ void Load(const bf16* x, int groups) {
#pragma unroll
    for (int j = 0; j < kGroups; ++j)
      of[j] = kAll || j < groups ? *reinterpret_cast<const uint4*>(x + j * 32) : make_uint4(0, 0, 0, 0);
  }
};

// Inputs of kGroups groups as the products take them, and what the groups' sums start from.
template <int kGroups>
struct Operands {
  uint4 in[kGroups];
  float start[kGroups][4];

  __device__ __forceinline__ Operands(const Inputs& x, const Surplus& surplus) {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) in[j] = ScaledInputs(x.of[j]);
    const float zero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < kGroups; ++j) MmaBf16From(start[j], surplus.a, in[j].x, in[j].y, zero);
#pragma unroll
    for (int j = 0; j < kGroups; ++j) MmaBf16From(start[j], surplus.a, in[j].z, in[j].w, start[j]);
  }
};

// acc[m] += W[m] x for 16-row halves m and eight columns x, over kGroups groups. The chains of products of
// several groups have to run side by side: one chain takes four times a product's latency.
template <int kGroups>
__device__ __forceinline__ void Multiply(float (&acc)[2][4], const Weights& weights,
                                         const Operands<kGroups>& x) {
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    const uint4 words = weights.words[j];
    const uint2 s = weights.scales[j];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      uint32_t low[4], high[4];
      Expand(m == 0 ? words.x : words.z, low);
      Expand(m == 0 ? words.y : words.w, high);
      const uint32_t first[4] = {low[0], high[0], low[1], high[1]},
                     second[4] = {low[2], high[2], low[3], high[3]};
      const float s0 = LowBf16(m == 0 ? s.x : s.y), s1 = HighBf16(m == 0 ? s.x : s.y);
      float sum[4];
      MmaBf16From(sum, first, x.in[j].x, x.in[j].y, x.start[j]);
      MmaBf16From(sum, second, x.in[j].z, x.in[j].w, sum);
      acc[m][0] = fmaf(s0, sum[0], acc[m][0]), acc[m][1] = fmaf(s0, sum[1], acc[m][1]);
      acc[m][2] = fmaf(s1, sum[2], acc[m][2]), acc[m][3] = fmaf(s1, sum[3], acc[m][3]);
    }
  }
}

}  // namespace kdt::cuda
