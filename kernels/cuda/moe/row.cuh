// Products for an expert that has a single row. A product has eight columns, and that row is one. So each of
// up to eight groups gets a column of its own: lane (g, t) holds the inputs of group g, all groups' products
// take that same operand, and of each the lanes of its group's column keep what they have. Scaling the inputs
// and the surplus product are done once for eight groups. Each group's sum is what it would be in column 0,
// and the groups are added up in the same order.
#pragma once

#include "kernels/cuda/moe/int4.cuh"

namespace kdt::cuda {

// Inputs 8 t .. 8 t + 7 of group g, and what the groups' sums start from.
struct RowInput {
  uint4 in;
  float start[4];

  __device__ __forceinline__ RowInput(const uint4& x, const Surplus& surplus) : in(ScaledInputs(x)) {
    const float zero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    MmaBf16From(start, surplus.a, in.x, in.y, zero);
    MmaBf16From(start, surplus.a, in.z, in.w, start);
  }
};

// What a lane keeps: the sums of groups 2 t and 2 t + 1 for rows g + 8 r, and their scales.
struct RowSums {
  float sum[2][4] = {};
  uint2 scale[2];

  // Of a part of up to four groups, the first of them the step's group `first`, 0 or 4.
  template <int kGroups>
  __device__ __forceinline__ void Take(uint4 (&words)[kSlotGroups], uint32_t slot, int first, int lane) {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) words[j] = LoadShared4U(slot + j * kGroupBytes + lane * 16);
    if ((lane & 2) * 2 == first) {
      const uint32_t from =
          slot + kSlotGroups * kGroupBytes + (lane & 1) * 2 * kGroupScaleBytes + (lane >> 2) * 8;
#pragma unroll
      for (int i = 0; i < 2; ++i) scale[i] = LoadShared2U(from + i * kGroupScaleBytes);
    }
  }
  template <int kGroups, int kFirst>
  __device__ __forceinline__ void Multiply(const uint4 (&words)[kSlotGroups], const RowInput& x, int lane) {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const float mine = (lane & 3) == kFirst / 2 + j / 2 ? 1.0f : 0.0f;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        uint32_t low[4], high[4];
        Expand(m == 0 ? words[j].x : words[j].z, low);
        Expand(m == 0 ? words[j].y : words[j].w, high);
        const uint32_t one[4] = {low[0], high[0], low[1], high[1]},
                       two[4] = {low[2], high[2], low[3], high[3]};
        float all[4];
        MmaBf16From(all, one, x.in.x, x.in.y, x.start);
        MmaBf16From(all, two, x.in.z, x.in.w, all);
        sum[j % 2][2 * m] = fmaf(all[j % 2], mine, sum[j % 2][2 * m]);
        sum[j % 2][2 * m + 1] = fmaf(all[2 + j % 2], mine, sum[j % 2][2 * m + 1]);
      }
    }
  }
  // Adds the step's groups to acc, as Multiply (int4.cuh) has it for column 0, from lane to lane.
  template <int kGroups>
  __device__ __forceinline__ void AddTo(float (&acc)[2][4]) const {
    float by[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      by[i][0] = LowBf16(scale[i].x), by[i][1] = HighBf16(scale[i].x);
      by[i][2] = LowBf16(scale[i].y), by[i][3] = HighBf16(scale[i].y);
    }
#pragma unroll
    for (int t = 0; t < 4; ++t) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float& to = acc[r / 2][r % 2 * 2];
        float next = fmaf(by[0][r], sum[0][r], to);
        if (2 * t + 1 < kGroups) next = fmaf(by[1][r], sum[1][r], next);
        to = __shfl_sync(~0u, next, t, 4);
      }
    }
  }
};

}  // namespace kdt::cuda
