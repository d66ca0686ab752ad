// Which expert a block works for and with which rows, found by each block from the router's choice: a
// separate kernel for this would cost more than it saves.
#pragma once

#include <cstdint>

namespace kdt::cuda {

inline constexpr int kMaxExperts = 1024;
inline constexpr int kListPairs = 256;  // pairs of one expert a block handles at a time

struct ExpertList {
  unsigned used[kMaxExperts / 32];
  int expert;
  int count;              // pairs of this expert in `pairs`
  int pairs[kListPairs];  // pair = row * top_k + k, rising within each batch of threads
};

// The `index`-th of the held experts that are chosen by any row (negative: there are fewer). The whole block
// calls it.
__device__ inline int FindExpert(ExpertList& list, const int32_t* ids, int pairs, int first_expert,
                                 int experts, int index) {
  for (int i = threadIdx.x; i < kMaxExperts / 32; i += blockDim.x) list.used[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
    const int e = ids[i] - first_expert;
    if (e >= 0 && e < experts) atomicOr(&list.used[e >> 5], 1u << (e & 31));
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const unsigned mine = list.used[threadIdx.x];
    int before = __popc(mine);
    for (int d = 1; d < 32; d <<= 1) {
      const int other = __shfl_up_sync(~0u, before, d);
      if (static_cast<int>(threadIdx.x) >= d) before += other;
    }
    const int total = __shfl_sync(~0u, before, 31);
    before -= __popc(mine);
    if (index >= total) {
      if (threadIdx.x == 0) list.expert = -1;
    } else if (index >= before && index < before + __popc(mine)) {
      list.expert = static_cast<int>(threadIdx.x) * 32 + static_cast<int>(__fns(mine, 0, index - before + 1));
    }
  }
  __syncthreads();
  return list.expert;
}

// Fills the list with the expert's pairs number skip .. skip + kListPairs - 1, and sets the count to all of
// them less skip. Where they do not fit one list they are numbered by rising index, so that every pair is in
// exactly one of the lists; else their order does not matter to any result.
__device__ inline void ListPairs(ExpertList& list, const int32_t* ids, int pairs, int wanted, int skip) {
  __shared__ int found[32];  // by each warp
  __syncthreads();
  if (threadIdx.x == 0) list.count = -skip;
  __syncthreads();
  if (pairs <= kListPairs) {
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
      if (ids[i] == wanted) list.pairs[atomicAdd(&list.count, 1)] = i;
    }
    __syncthreads();
    return;
  }
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  int before = -skip;
  for (int first = 0; first < pairs; first += blockDim.x) {
    const int i = first + static_cast<int>(threadIdx.x);
    const bool mine = i < pairs && ids[i] == wanted;
    const unsigned votes = __ballot_sync(~0u, mine);
    if (lane == 0) found[warp] = __popc(votes);
    __syncthreads();
    int at = before + __popc(votes & ((1u << lane) - 1));
    for (int w = 0; w < warps; ++w) {
      if (w < warp) at += found[w];
      before += found[w];
    }
    if (mine && at >= 0 && at < kListPairs) list.pairs[at] = i;
    __syncthreads();
  }
  if (threadIdx.x == 0) list.count = before;
  __syncthreads();
}

}  // namespace kdt::cuda
