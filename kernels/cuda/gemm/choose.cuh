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

inline constexpr int kChoiceExperts = 512;  // of a row in a warp's registers

// Rising with x; NaN below everything; 0 is left for "taken". Both zeros are one value.
__device__ __forceinline__ uint32_t OrderedKey(float x) {
  if (!(x == x)) return 1;
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float Sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// All lanes of a warp. kPerLane * 32 is at least the number of experts.
template <int kPerLane>
__device__ __forceinline__ void ChooseRow(const ChoiceParams& p, int row) {
  const int lane = threadIdx.x & 31;
  int32_t* const ids = p.ids + static_cast<int64_t>(row) * p.top_k;
  float* const weights = p.weights + static_cast<int64_t>(row) * p.top_k;
  if (p.row_count != nullptr && row >= *p.row_count) {  // padding
    if (lane < p.top_k) ids[lane] = -1, weights[lane] = 0.0f;
    return;
  }
  const float* const scores = p.scores + static_cast<int64_t>(row) * p.experts;
  uint32_t keys[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = lane + 32 * i;
    keys[i] = e < p.experts ? OrderedKey(Sigmoid(__ldcg(scores + e)) + p.bias[e]) : 0;
  }
  uint32_t best = 0;  // of this lane's, and its place
  int at = 0;
  int mine = 0x7fffffff;  // lane k: the k-th choice
#pragma unroll 1
  for (int k = 0; k < p.top_k; ++k) {
    best = keys[0];
    at = 0;
#pragma unroll
    for (int i = 1; i < kPerLane; ++i) {
      if (keys[i] > best) best = keys[i], at = i;
    }
    const uint32_t most = __reduce_max_sync(~0u, best);
    const int expert = best == most ? lane + 32 * at : 0x7fffffff;
    const int chosen = static_cast<int>(__reduce_min_sync(~0u, static_cast<unsigned>(expert)));
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (lane + 32 * i == chosen) keys[i] = 0;
    }
    if (lane == k) mine = chosen;
  }
  // Listed, and summed, by rising expert.
  const float score = lane < p.top_k ? Sigmoid(__ldcg(scores + mine)) : 0.0f;
  int rank = 0;
#pragma unroll 1
  for (int k = 0; k < p.top_k; ++k) rank += __shfl_sync(~0u, mine, k) < mine;
  float sum = 0.0f;
#pragma unroll 1
  for (int k = 0; k < p.top_k; ++k) {
    const unsigned holder = __ballot_sync(~0u, lane < p.top_k && rank == k);
    sum += __shfl_sync(~0u, score, __ffs(static_cast<int>(holder)) - 1);
  }
  if (lane >= p.top_k) return;
  ids[rank] = mine;
  weights[rank] = score * (p.normalize ? p.scale / (sum + 1e-20f) : p.scale);
}

}  // namespace kdt::cuda
