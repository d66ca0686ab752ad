// First kernel of verify_attention: one item = 16, 32 or 64 query rows of a sequence against one split of its
// keys, 16 keys a round. The warps of a block have two roles (docs/kernels.md has the arithmetic behind
// this):
//
//   score warps  QK. Two for each group of rows; each holds its rows' queries for half of the 576 columns in
//                registers (the rope part in shared memory) and leaves its partial scores, float32, in shared
//                memory.
//   value warps  Four for each group. They load the key tiles (the groups take turns), add the two score
//                halves, do the softmax of 8 rows each, and accumulate P x V for 128 output columns each, V
//                being the key tile again.
//
// Value warps work on P x V of round r between the steps of the softmax of round r + 1, score warps run up to
// two rounds ahead. That tiles and scores are there is told by mbarriers, that value warps have read them by
// named barriers; P is exchanged within a group by one named barrier a round.
#pragma once

#include <type_traits>

#include "kernels/cuda/verify_attention/score_warp.cuh"
#include "kernels/cuda/verify_attention/value_warp.cuh"

namespace kdt::cuda {

// sm_120 has shared memory for one block a multiprocessor, which may then use all registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
template <class C>
inline constexpr int kBlocksOf = 1;
#else
template <class C>
inline constexpr int kBlocksOf = C::kMinBlocks;
#endif

inline constexpr int kFewRounds = 16;

// One item of the class `of` a block; blocks beyond the last item leave at once, so the grid need not depend
// on the lengths.
//
// Launched as a programmatic dependent. Before it waits for the kernel in front of it, it reads only what no
// kernel of the step writes: lengths, tables, and keys of committed rows. So the plan, the slots and the
// first tiles are in while the queries are still being made.
// N: the configuration for narrow tiles where a sequence may get those (VerifyClass.narrow_below), else void.
template <class C, class N = void>
__global__ void __launch_bounds__(C::kThreads, kBlocksOf<C>)
    VerifyPartial(const __grid_constant__ VerifyParams p, const __grid_constant__ VerifyClass of) {
  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t base = SharedAddress(smem);
  const int lane = threadIdx.x & 31;
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);  // known to the compiler as the same in all lanes
  Item& it = *reinterpret_cast<Item*>(smem + C::kItemAt);
  if (warp == 0) {
    const Item found = Planner(p, of).Find(blockIdx.x, false);
    if (lane == 0) it = found;
  } else if (threadIdx.x == 32) {
    constexpr int kBarriers = (C::kItemAt - C::kFullAt) / 8;
    for (int i = 0; i < kBarriers; ++i) {
      const int at = C::kFullAt + 8 * i;
      BarrierInit(base + at, at < C::kRopeEmptyAt    ? 128  // the loading group's threads
                             : at < C::kScoresFullAt ? C::kScoreWarps * 32
                                                     : 2 * 32);  // score warps of a group
    }
  }
  __syncthreads();
  if (it.sequence < 0) {
    LaunchDependents();
    WaitForPrevious();  // no block may end before that, or what comes behind could start too early
    return;
  }
  // Short of keys the launch leaves room: the reduce kernel and what follows may settle down beside it.
  if (C::kGroups == 1 || KeyTiles(it.end - it.begin) <= kFewRounds) LaunchDependents();
  if constexpr (!std::is_void_v<N>) {
    static_assert(N::kFullAt == C::kFullAt && N::kItemAt == C::kItemAt && N::kScoreWarps == C::kScoreWarps &&
                  N::kValueWarps == C::kValueWarps);
    if (it.narrow) {
      if (warp < N::kScoreWarps) {
        ScoreWarp<N>(p, it, base, warp);
      } else {
        ValueWarp<N>(p, of, it, base, warp - N::kScoreWarps);
      }
      return;
    }
  }
  if (warp < C::kScoreWarps) {
    ScoreWarp<C>(p, it, base, warp);
  } else {
    ValueWarp<C>(p, of, it, base, warp - C::kScoreWarps);
  }
}

}  // namespace kdt::cuda
