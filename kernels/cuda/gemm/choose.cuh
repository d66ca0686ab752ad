// The choice of a row's experts by one warp, from the row's raw scores. It runs once a launch, with its code
// not in the instruction cache: short code is worth more here than few instructions executed.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/types.cuh"

namespace kdt::cuda {

struct ChoiceParams {
  const float* scores;  // [rows, experts], before the sigmoid
  const float* bias;
  const int32_t* row_count;
  int32_t* ids;
  float* weights;
  int rows, experts, top_k;
  bool normalize;
  float scale;
};

inline constexpr int kFewExperts = 384, kChoiceExperts = 512;  // of a row in a warp's registers

// Rising with x; NaN below everything; 0 is left for "taken". Both zeros are one value.
__device__ __forceinline__ uint32_t OrderedKey(float x) {
  if (!(x == x)) return 1;
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float Sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// The largest key, the earliest among equals. Few are compared in a tree, so that the comparisons overlap;
// for many there are not the registers.
template <int kCount>
__device__ __forceinline__ void Largest(const uint32_t (&keys)[kCount], uint32_t& best, int& at) {
  if constexpr (kCount > 16) {
    best = keys[0];
    at = 0;
#pragma unroll
    for (int i = 1; i < kCount; ++i) {
      if (keys[i] > best) best = keys[i], at = i;
    }
  } else {
    uint32_t value[kCount];
    int place[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) value[i] = keys[i], place[i] = i;
#pragma unroll
    for (int width = 1; width < kCount; width *= 2) {
#pragma unroll
      for (int i = 0; i + width < kCount; i += 2 * width) {
        if (value[i + width] > value[i]) value[i] = value[i + width], place[i] = place[i + width];
      }
    }
    best = value[0];
    at = place[0];
  }
}

// All lanes of a warp. kPerLane * 32 is at least the number of experts.
template <int kPerLane>
__device__ __forceinline__ void ChooseRow(const ChoiceParams& p, int row) {
  const int lane = threadIdx.x & 31;
  int32_t* const ids = p.ids + static_cast<int64_t>(row) * p.top_k;
  float* const weights = p.weights + static_cast<int64_t>(row) * p.top_k;
  const float* const scores = p.scores + static_cast<int64_t>(row) * p.experts;
  uint32_t keys[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = lane + 32 * i;
    keys[i] = e < p.experts ? OrderedKey(Sigmoid(__ldcg(scores + e)) + p.bias[e]) : 0;
  }
  if (p.row_count != nullptr && row >= *p.row_count) {  // padding
    if (lane < p.top_k) ids[lane] = -1, weights[lane] = 0.0f;
    return;
  }
  int mine = 0x7fffffff;  // lane k: the k-th choice
#pragma unroll 1
  for (int k = 0; k < p.top_k; ++k) {
    uint32_t best;
    int at;
    Largest(keys, best, at);
    const uint32_t most = __reduce_max_sync(~0u, best);
    const int expert = best == most ? lane + 32 * at : 0x7fffffff;
    const int chosen = static_cast<int>(__reduce_min_sync(~0u, static_cast<unsigned>(expert)));
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (lane + 32 * i == chosen) keys[i] = 0;
    }
    if (lane == k) mine = chosen;
  }
  // Listed, and summed, by rising expert: lane r takes the one of rank r.
  const float score = lane < p.top_k ? Sigmoid(__ldcg(scores + mine)) : 0.0f;
  int rank = 0, holder = 0;
#pragma unroll 4
  for (int k = 0; k < p.top_k; ++k) rank += __shfl_sync(~0u, mine, k) < mine;
#pragma unroll 4
  for (int k = 0; k < p.top_k; ++k) {
    if (__shfl_sync(~0u, rank, k) == lane) holder = k;
  }
  const float sorted = __shfl_sync(~0u, score, holder);
  const int expert = __shfl_sync(~0u, mine, holder);
  float sum = 0.0f;
#pragma unroll 4
  for (int k = 0; k < p.top_k; ++k) sum += __shfl_sync(~0u, sorted, k);
  if (lane >= p.top_k) return;
  ids[lane] = expert;
  weights[lane] = sorted * (p.normalize ? p.scale / (sum + 1e-20f) : p.scale);
}

}  // namespace kdt::cuda
