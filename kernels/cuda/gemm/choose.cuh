// The choice of a row's experts by four warps, from the row's raw scores: a bound below the best top_k leaves
// few candidates, which one warp ranks. It runs once a launch, with its code not in the instruction cache,
// and everything waits for it: short code and few steps in a row.
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

inline constexpr int kChoiceWarps = 4, kChoiceThreads = 32 * kChoiceWarps;
inline constexpr int kFewExperts = 384, kChoiceExperts = 512;

// Shared memory of a choice among kPerLane * kChoiceThreads experts.
template <int kPerLane>
struct ChoiceRoom {
  uint4 group_best[kChoiceWarps][8], best[kChoiceWarps][8];  // keys, of 32 groups of experts
  int candidates[kChoiceWarps];
  uint32_t keys[kChoiceWarps][32 * kPerLane];  // of the candidates of a warp's experts, and with them
  float scores[kChoiceWarps][32 * kPerLane];
  int experts[kChoiceWarps][32 * kPerLane];
  uint4 ranked[8];  // keys of up to 32 candidates
  float chosen[32];
};

// Rising with x; NaN below everything; 0 is left for "taken". Both zeros are one value.
__device__ __forceinline__ uint32_t OrderedKey(float x) {
  if (!(x == x)) return 1;
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float Sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// Of a chosen expert with this score, where the row's chosen ones have `sum`.
__device__ __forceinline__ float ChoiceWeight(const ChoiceParams& p, float score, float sum) {
  return score * (p.normalize ? p.scale / (sum + 1e-20f) : p.scale);
}

// How many of four keys are at least `key`.
__device__ __forceinline__ int AtLeast(const uint4& four, uint32_t key) {
  return (four.x >= key) + (four.y >= key) + (four.z >= key) + (four.w >= key);
}

// Called by kChoiceThreads threads of a block, from a multiple of that number on. Experts up to
// kPerLane * kChoiceThreads.
template <int kPerLane>
__device__ __forceinline__ void ChooseRow(const ChoiceParams& p, int row, ChoiceRoom<kPerLane>& room) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 % kChoiceWarps;
  const int barrier = 1 + threadIdx.x / kChoiceThreads;
  const int first = warp * 32 * kPerLane + lane;  // a warp's experts follow each other
  float bias[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) bias[i] = first + 32 * i < p.experts ? p.bias[first + 32 * i] : 0.0f;
  WaitForPrevious();
  const float* const scores = p.scores + static_cast<int64_t>(row) * p.experts;
  int32_t* const ids = p.ids + static_cast<int64_t>(row) * p.top_k;
  float* const weights = p.weights + static_cast<int64_t>(row) * p.top_k;
  float score[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i)
    score[i] = first + 32 * i < p.experts ? __ldcg(scores + first + 32 * i) : 0.0f;
  if (p.row_count != nullptr && row >= *p.row_count) {  // padding
    if (warp == 0 && lane < p.top_k) ids[lane] = -1, weights[lane] = 0.0f;
    return;
  }
  uint32_t keys[kPerLane], most = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    score[i] = Sigmoid(score[i]);
    keys[i] = first + 32 * i < p.experts ? OrderedKey(score[i] + bias[i]) : 0;
    most = max(most, keys[i]);
  }
  // The best of each of 32 groups: the best top_k experts are no worse than the top_k-th best of these.
  reinterpret_cast<uint32_t*>(room.group_best[warp])[lane] = most;
  NamedBarrier(barrier, kChoiceThreads);
#pragma unroll
  for (int w = 0; w < kChoiceWarps; ++w)
    most = max(most, reinterpret_cast<const uint32_t*>(room.group_best[w])[lane]);
  reinterpret_cast<uint32_t*>(room.best[warp])[lane] = most;
  __syncwarp();
  int as_good = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) as_good += AtLeast(room.best[warp][i], most);
  const uint32_t bound = max(1u, __reduce_max_sync(~0u, as_good >= p.top_k ? most : 0u));
  int count = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const bool good = keys[i] >= bound;
    const unsigned all = __ballot_sync(~0u, good);
    if (good) {
      const int at = count + __popc(all & ((1u << lane) - 1));
      room.keys[warp][at] = keys[i];
      room.scores[warp][at] = score[i];
      room.experts[warp][at] = first + 32 * i;
    }
    count += __popc(all);
  }
  if (lane == 0) room.candidates[warp] = count;
  NamedBarrier(barrier, kChoiceThreads);
  if (warp != 0) return;

  // Candidates by rising expert, those of one warp after the other.
  int before[kChoiceWarps + 1] = {};
#pragma unroll
  for (int w = 0; w < kChoiceWarps; ++w) before[w + 1] = before[w] + room.candidates[w];
  const int total = before[kChoiceWarps];
  const auto place = [&](int number, int& from, int& at) {
    from = 0;
#pragma unroll
    for (int w = 1; w < kChoiceWarps; ++w) from += number >= before[w];
    at = number;
#pragma unroll
    for (int w = 1; w < kChoiceWarps; ++w) at -= from >= w ? room.candidates[w - 1] : 0;
  };
  float sigmoid = 0.0f;
  int expert = 0;
  bool mine = false;  // the lane's candidate is one of the top_k
  if (total <= 32) {
    uint32_t key = 0;
    if (lane < total) {
      int from, at;
      place(lane, from, at);
      key = room.keys[from][at];
      sigmoid = room.scores[from][at];
      expert = room.experts[from][at];
    }
    reinterpret_cast<uint32_t*>(room.ranked)[lane] = key;
    __syncwarp();
    int rank = 0;
#pragma unroll 1
    for (int i = 0; 4 * i < total; ++i) {
      const uint4 four = room.ranked[i];
      const uint32_t others[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) rank += others[j] > key || (others[j] == key && 4 * i + j < lane);
    }
    mine = lane < total && rank < p.top_k;
  } else {
    // Many are equal. One after the other: the largest key, the lowest expert among equals.
    uint32_t last_key = ~0u;
    int last = -1, kept = 0;
#pragma unroll 1
    for (int k = 0; k < p.top_k; ++k) {
      uint32_t best = 0;
      int best_number = 0x7fffffff;
#pragma unroll 1
      for (int number = lane; number < total; number += 32) {
        int from, at;
        place(number, from, at);
        const uint32_t key = room.keys[from][at];
        const bool left = key < last_key || (key == last_key && number > last);
        if (left && key > best) best = key, best_number = number;
      }
      last_key = __reduce_max_sync(~0u, best);
      last = static_cast<int>(
          __reduce_min_sync(~0u, static_cast<unsigned>(best == last_key ? best_number : 0x7fffffff)));
      if (lane == k) kept = last;
    }
    // Lane r takes the one of rank r by expert.
    int rank = 0, holder = 0;
#pragma unroll 1
    for (int k = 0; k < p.top_k; ++k) rank += __shfl_sync(~0u, kept, k) < kept;
#pragma unroll 1
    for (int k = 0; k < p.top_k; ++k) {
      if (__shfl_sync(~0u, rank, k) == lane) holder = k;
    }
    kept = __shfl_sync(~0u, kept, holder);
    mine = lane < p.top_k;
    if (mine) {
      int from, at;
      place(kept, from, at);
      sigmoid = room.scores[from][at];
      expert = room.experts[from][at];
    }
  }
  // Listed, and summed, by rising expert.
  const unsigned all = __ballot_sync(~0u, mine);
  const int at = __popc(all & ((1u << lane) - 1));
  if (mine) room.chosen[at] = sigmoid;
  __syncwarp();
  float sum = 0.0f;
#pragma unroll 4
  for (int k = 0; k < p.top_k; ++k) sum += room.chosen[k];
  if (!mine) return;
  ids[at] = expert;
  weights[at] = ChoiceWeight(p, sigmoid, sum);
}

}  // namespace kdt::cuda
