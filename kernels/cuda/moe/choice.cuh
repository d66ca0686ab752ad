// The router's choice turned round: which of the held experts have rows, and which. Every block makes the
// list for itself in shared memory: a separate kernel for it would cost more than it saves.
#pragma once

#include <cstdint>

namespace kdt::cuda {

inline constexpr int kMaxExperts = 1024;
inline constexpr int kMoeThreads = 512;

struct Choice {
  int active;               // experts that have rows
  unsigned long long held;  // pairs 0..63 whose expert is held here
  int warp_totals[kMoeThreads / 32];
  float weights[64];                // of pairs 0..63
  uint16_t expert[kMaxExperts];     // [active], rising
  uint16_t begin[kMaxExperts + 8];  // [active + 1], into the list of pairs
};

// What MakeChoice needs of the block before: `counts` cleared, kMaxExperts ints of scratch. It reads no
// step data, so it may stand before the wait for the kernel in front.
__device__ __forceinline__ void PrepareChoice(int* counts) {
  for (int e = threadIdx.x; e < kMaxExperts; e += kMoeThreads) counts[e] = 0;
}

// pair = row * top_k + k. PrepareChoice has been called, with a barrier between. The order of an expert's
// pairs does not matter to any result. The whole block calls it; the caller synchronises afterwards.
__device__ __forceinline__ void MakeChoice(Choice& choice, uint16_t* pairs_out, int* counts,
                                           const int32_t* ids, int pairs, bool one_row, int first_expert,
                                           int experts) {
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const auto held = [&](int e) { return e >= first_expert && e < first_expert + experts; };
  if (one_row && pairs <= 32) {
    // Its experts are all different and rise already, so nothing is to be counted.
    if (warp > 0) return;
    const int e = lane < pairs ? ids[lane] : -1;
    const unsigned all = __ballot_sync(~0u, held(e));
    const int at = __popc(all & ((1u << lane) - 1));
    if (held(e)) {
      choice.expert[at] = static_cast<uint16_t>(e - first_expert);
      pairs_out[at] = static_cast<uint16_t>(lane);
    }
    choice.begin[lane] = static_cast<uint16_t>(lane);
    if (lane == 0) {
      choice.active = __popc(all);
      choice.begin[32] = 32;
      choice.held = all;
    }
    return;
  }
  // Up to a pair a thread, its place among its expert's is what the count was.
  const int mine = tid < pairs ? ids[tid] - first_expert : -1;
  const bool some = mine >= 0 && mine < experts;
  int place = 0;
  if (some) place = atomicAdd(&counts[mine], 1);
  if (warp < 2) {
    const unsigned all = __ballot_sync(~0u, some);
    if (lane == 0) reinterpret_cast<unsigned*>(&choice.held)[warp] = all;
  }
  __syncthreads();
  const auto others = [&](auto f) {
    for (int i = tid + kMoeThreads; i < pairs; i += kMoeThreads) {
      const int e = ids[i];
      if (held(e)) f(e - first_expert, i);
    }
  };
  if (pairs > kMoeThreads) {
    others([&](int e, int) { atomicAdd(&counts[e], 1); });
    __syncthreads();
  }
  constexpr int kEach = kMaxExperts / kMoeThreads;
  static_assert(kEach == 2 && kMoeThreads / 32 <= 32);
  const int2 count = reinterpret_cast<const int2*>(counts)[tid];
  // Experts in the upper, pairs in the lower half.
  const int first = (count.x > 0 ? 1 << 16 : 0) + count.x,
            sum = first + (count.y > 0 ? 1 << 16 : 0) + count.y;
  int through = sum;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const int other = __shfl_up_sync(~0u, through, d);
    if (lane >= d) through += other;
  }
  if (lane == 31) choice.warp_totals[warp] = through;
  __syncthreads();
  const int before = through - sum + __reduce_add_sync(~0u, lane < warp ? choice.warp_totals[lane] : 0);
  const auto enter = [&](int e, int at) {
    choice.expert[at >> 16] = static_cast<uint16_t>(e);
    choice.begin[at >> 16] = static_cast<uint16_t>(at);
  };
  if (count.x > 0) enter(2 * tid, before);
  if (count.y > 0) enter(2 * tid + 1, before + first);
  reinterpret_cast<int2*>(counts)[tid] = make_int2(before & 0xffff, before + first & 0xffff);
  if (tid == kMoeThreads - 1) {
    const int end = before + sum;
    choice.active = end >> 16;
    choice.begin[end >> 16] = static_cast<uint16_t>(end);
  }
  __syncthreads();
  if (pairs <= kMoeThreads) {
    if (some) pairs_out[counts[mine] + place] = static_cast<uint16_t>(tid);
  } else {
    if (some) pairs_out[atomicAdd(&counts[mine], 1)] = static_cast<uint16_t>(tid);
    others([&](int e, int i) { pairs_out[atomicAdd(&counts[e], 1)] = static_cast<uint16_t>(i); });
  }
}

// The same for up to 32 pairs, by the block's first warp, a lane a pair.
__device__ __forceinline__ void MakeWarpChoice(Choice& choice, uint16_t* pairs_out, const int32_t* ids,
                                               int pairs, int first_expert, int experts) {
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x;
  // Experts from the first one held here on; those of others are larger than all of these.
  uint32_t mine = lane < pairs ? static_cast<uint32_t>(ids[lane] - first_expert) : ~0u;
  const bool held = mine < static_cast<uint32_t>(experts);
  if (!held) mine = ~0u;
  const unsigned all = __ballot_sync(~0u, held), below = (1u << lane) - 1;
  const unsigned same = __match_any_sync(~0u, mine) & below;
  const bool first = held && same == 0;
  const unsigned firsts = __ballot_sync(~0u, first);
  unsigned less = 0;  // whose expert comes before
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    if (__shfl_sync(~0u, mine, i) < mine) less |= 1u << i;
  }
  if (held) pairs_out[__popc(less & all) + __popc(same)] = static_cast<uint16_t>(lane);
  if (first) {
    choice.expert[__popc(less & firsts)] = static_cast<uint16_t>(mine);
    choice.begin[__popc(less & firsts)] = static_cast<uint16_t>(__popc(less & all));
  }
  if (lane == 0) {
    choice.active = __popc(firsts);
    choice.begin[__popc(firsts)] = static_cast<uint16_t>(__popc(all));
    choice.held = all;
  }
}

// The same for up to eight rows of eight pairs, with one meeting: eight threads a pair, each of which
// compares it with the pairs of a row. Ids are read sixteen bytes at a time. `firsts` is room for a byte a
// warp.
inline constexpr int kFewChoiceRows = 8, kFewChoiceTopK = 8;

__device__ __forceinline__ void MakeFewChoice(Choice& choice, uint16_t* pairs_out, const int32_t* ids,
                                              int rows, int first_expert, int experts) {
  uint8_t* const firsts = reinterpret_cast<uint8_t*>(choice.warp_totals);  // a warp's four pairs
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int pair = tid / kFewChoiceRows, other = tid % kFewChoiceRows, row = pair / kFewChoiceTopK;
  static_assert(kMoeThreads == kFewChoiceRows * kFewChoiceRows * kFewChoiceTopK);
  // Experts from the first one held here on; those of others are larger than all of these.
  uint32_t of_row[kFewChoiceTopK];
  uint32_t mine = ~0u;
  if (other < rows) {
    const int4* const from = reinterpret_cast<const int4*>(ids + other * kFewChoiceTopK);
    const int4 low = from[0], high = from[1];
    const int all[kFewChoiceTopK] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int k = 0; k < kFewChoiceTopK; ++k) of_row[k] = static_cast<uint32_t>(all[k] - first_expert);
  } else {
#pragma unroll
    for (int k = 0; k < kFewChoiceTopK; ++k) of_row[k] = ~0u;
  }
  if (row < rows) mine = static_cast<uint32_t>(ids[pair] - first_expert);
  const bool held = mine < static_cast<uint32_t>(experts);
  unsigned less = 0;
  bool equal = false;
#pragma unroll
  for (int k = 0; k < kFewChoiceTopK; ++k) {
    if (of_row[k] < mine) less |= 1u << k;
    equal = equal || of_row[k] == mine;
  }
  const auto sum = [](int x) {  // over the pair's threads
#pragma unroll
    for (int d = 1; d < kFewChoiceRows; d <<= 1) x += __shfl_xor_sync(~0u, x, d);
    return x;
  };
  // Before it in the list, and among these those of its expert.
  const int same = equal && other < row;
  const int before = sum(__popc(less) + same + (same << 16)), at = before & 0xffff;
  const bool first = held && before >> 16 == 0;
  const auto packed = [](unsigned all) {
    return (all & 1) | (all >> 7 & 2) | (all >> 14 & 4) | (all >> 21 & 8);
  };
  const unsigned some_first = packed(__ballot_sync(~0u, first)), some_held = packed(__ballot_sync(~0u, held));
  if (lane == 0) {
    firsts[warp] = static_cast<uint8_t>(some_first);
    atomicOr(reinterpret_cast<unsigned*>(&choice.held) + warp / 8, some_held << warp % 8 * 4);
  }
  __syncthreads();
  const unsigned two = reinterpret_cast<const uint16_t*>(firsts)[other];
  const unsigned first_of_row = (two & 0xf) | (two >> 4 & 0xf0);
  const int counts = sum(__popc(less & first_of_row) + (__popc(first_of_row) << 16));
  if (tid == 0) {
    choice.active = counts >> 16;
    choice.begin[counts >> 16] = static_cast<uint16_t>(__popcll(choice.held));
  }
  if (!held || other != 0) return;
  pairs_out[at] = static_cast<uint16_t>(pair);
  if (!first) return;
  choice.expert[counts & 0xffff] = static_cast<uint16_t>(mine);
  choice.begin[counts & 0xffff] = static_cast<uint16_t>(at);
}

}  // namespace kdt::cuda
