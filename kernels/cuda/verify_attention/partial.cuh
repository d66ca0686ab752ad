// First kernel of verify_attention: one item = 16, 32 or 64 query rows of a sequence against one split of its
// keys, 16 keys a round. The warps of a block have two roles (the arithmetic behind this:
// docs/kernels/verify_attention.md):
//
//   score warps  QK. Two for each group of rows; each holds its rows' queries for half of the 576 columns in
//                registers (the rope part in shared memory).
//   value warps  Four for each group. They load the key tiles and accumulate P x V for 128 output columns
//                each, V being the key tile again.
//
// Up to 32 query rows (one group) the value warps do the softmax too, 8 rows each, between the products of
// the round before. With more (two groups, tall_config.cuh) the score warps do it and store P as fragments.
// Score warps run up to two rounds ahead. That data is there is told by mbarriers, that it has been read by
// named barriers.
#pragma once

#include <type_traits>

#include "kernels/cuda/verify_attention/score_warp.cuh"
#include "kernels/cuda/verify_attention/tall_score_warp.cuh"
#include "kernels/cuda/verify_attention/tall_value_warp.cuh"
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

template <class C>
__device__ __forceinline__ void InitBarriers(uint32_t base) {
  constexpr int kBarriers = (C::kItemAt - C::kFullAt) / 8;
  for (int i = 0; i < kBarriers; ++i) {
    const int at = C::kFullAt + 8 * i;
    int count = 0;
    if constexpr (C::kTall) {
      count = at >= C::kGoAt         ? 2        // a lane of each score warp of a group
              : at < C::kProbsFullAt ? 4        // a lane of each value warp of the loading group
                                     : 2 * 32;  // score warps of a group
    } else {
      count =
          at < C::kRopeEmptyAt ? 128 : C::kScoreWarps * 32;  // the value warps' threads, or the score warps'
    }
    BarrierInit(base + at, count);
  }
  if constexpr (C::kTall) FenceBulk();  // bulk copies will complete on them
}

template <class C>
__device__ __forceinline__ void RunWarp(const VerifyParams& p, const VerifyClass& of, const Item& it,
                                        uint32_t base, int warp) {
  if constexpr (C::kTall) {
    if (warp < C::kScoreWarps) {
      TallScoreWarp<C>(p, of, it, base, warp);
    } else {
      TallValueWarp<C>(p, of, it, base, warp - C::kScoreWarps);
    }
  } else {
    if (warp < C::kScoreWarps) {
      ScoreWarp<C>(p, it, base, warp);
    } else {
      ValueWarp<C>(p, of, it, base, warp - C::kScoreWarps);
    }
  }
}

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
    InitBarriers<C>(base);
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
      RunWarp<N>(p, of, it, base, warp);
      return;
    }
  }
  RunWarp<C>(p, of, it, base, warp);
}

}  // namespace kdt::cuda
