// The router's choice turned round: which of the held experts have rows, and which. Every block makes the
// list for itself in shared memory: a separate kernel for it would cost more than it saves.
#pragma once

#include <cstdint>

namespace kdt::cuda {

inline constexpr int kMaxExperts = 1024;
inline constexpr int kMoeThreads = 512;

struct Choice {
  int active;               // experts that have rows
  unsigned phase;           // 0 or kPhaseBit: which set of counters this launch uses
  unsigned long long held;  // pairs 0..63 whose expert is held here
  int warp_totals[kMoeThreads / 32];
  float weights[64];                // of pairs 0..63
  uint16_t expert[kMaxExperts];     // [active], rising
  uint16_t begin[kMaxExperts + 8];  // [active + 1], into the list of pairs
};

// pair = row * top_k + k. `counts` is scratch, kMaxExperts ints. The order of an expert's pairs does not
// matter to any result. The whole block calls it; the caller synchronises afterwards.
__device__ __forceinline__ void MakeChoice(Choice& choice, uint16_t* pairs_out, int* counts,
                                           const int32_t* ids, int pairs, int first_expert, int experts) {
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const auto held = [&](int e) { return e >= first_expert && e < first_expert + experts; };
  if (pairs <= 32) {
    // A few rows: one warp, no counting. The k-th distinct expert's pairs are those lanes that hold it.
    if (warp > 0) return;
    const int e = lane < pairs ? ids[lane] : -1;
    const bool mine = held(e);
    const int key = mine ? e - first_expert : kMaxExperts + lane;
    const unsigned same = __match_any_sync(~0u, key);
    const bool leader = mine && (__ffs(same) - 1 == lane);
    const unsigned leaders = __ballot_sync(~0u, leader), all = __ballot_sync(~0u, mine);
    // Distinct experts and pairs before mine in rising order.
    int index = 0, before = 0;
    for (unsigned rest = leaders; rest != 0; rest &= rest - 1) {
      const int other = __ffs(rest) - 1;
      const int other_key = __shfl_sync(~0u, key, other);
      const int other_count = __popc(__shfl_sync(~0u, same, other));
      if (other_key < key) ++index, before += other_count;
    }
    if (leader)
      choice.expert[index] = static_cast<uint16_t>(key), choice.begin[index] = static_cast<uint16_t>(before);
    if (mine) pairs_out[before + __popc(same & ((1u << lane) - 1))] = static_cast<uint16_t>(lane);
    if (lane == 0) {
      const int active = __popc(leaders);
      choice.active = active;
      choice.begin[active] = static_cast<uint16_t>(__popc(all));
      choice.held = all;
    }
    return;
  }
  for (int e = tid; e < kMaxExperts; e += kMoeThreads) counts[e] = 0;
  __syncthreads();
  for (int i = tid; i < pairs; i += kMoeThreads) {
    const int e = ids[i];
    if (held(e)) atomicAdd(&counts[e - first_expert], 1);
  }
  if (warp < 2) {
    const unsigned some = __ballot_sync(~0u, tid < pairs && held(ids[tid]));
    if (lane == 0) reinterpret_cast<unsigned*>(&choice.held)[warp] = some;
  }
  __syncthreads();
  constexpr int kEach = kMaxExperts / kMoeThreads;
  int count[kEach], sum = 0;  // experts in the upper, pairs in the lower half
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    count[j] = counts[tid * kEach + j];
    sum += (count[j] > 0 ? 1 << 16 : 0) + count[j];
  }
  int through = sum;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const int other = __shfl_up_sync(~0u, through, d);
    if (lane >= d) through += other;
  }
  if (lane == 31) choice.warp_totals[warp] = through;
  __syncthreads();
  int before = through - sum;
  for (int i = 0; i < warp; ++i) before += choice.warp_totals[i];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    if (count[j] == 0) continue;
    choice.expert[before >> 16] = static_cast<uint16_t>(tid * kEach + j);
    choice.begin[before >> 16] = static_cast<uint16_t>(before);
    counts[tid * kEach + j] = before & 0xffff;
    before += (1 << 16) + count[j];
  }
  if (tid == kMoeThreads - 1) {
    choice.active = before >> 16;
    choice.begin[before >> 16] = static_cast<uint16_t>(before);
  }
  __syncthreads();
  for (int i = tid; i < pairs; i += kMoeThreads) {
    const int e = ids[i];
    if (held(e)) pairs_out[atomicAdd(&counts[e - first_expert], 1)] = static_cast<uint16_t>(i);
  }
}

}  // namespace kdt::cuda
