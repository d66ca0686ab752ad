// The score warps of the partial kernel (partial.cuh): queries into registers, then QK round by round.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/verify_attention/config.cuh"
#include "kernels/cuda/verify_attention/plan.cuh"
#include "kernels/cuda/verify_attention/queries.cuh"

namespace kdt::cuda {

// Score warp `warp`: half of the columns.
template <class C>
__device__ __forceinline__ void ScoreWarp(const VerifyParams& p, const Item& it, uint32_t base, int warp) {
  constexpr int kMTiles = C::kMTiles;
  const int lane = threadIdx.x & 31;
  const int half = warp;
  const int rounds = __shfl_sync(~0u, KeyTiles(it.end - it.begin), 0);  // in a uniform register
  WaitForPrevious();

  uint32_t q[kMTiles][16][4];
  LoadQueries<C>(
      p, it, base, warp, [&](int m) { return 16 * m + (lane & 15); }, q);

  const uint32_t latent_lane = Pinned(base + C::kLatentAt + ((lane & 7) + ((lane >> 4) << 3)) * 1024 +
                                      half * 512 + ((((lane >> 3) & 1) ^ (lane & 7)) << 4));
  const uint32_t rope_lane = base + C::kRopeAt + ((lane & 7) + ((lane >> 4) << 3)) * 128 +
                             (((4 * half + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
  const uint32_t query_lane =
      base + C::kQueryRopeAt + (lane & 15) * 128 + (((4 * half + (lane >> 4)) ^ (lane & 7)) << 4);
  const uint32_t score_base = base + C::kScoresAt + half * C::kScoreHalf;
  const uint32_t scores_full = base + C::kScoresFullAt;

  // A lone row tile has sums of its own for odd steps: chains of products half as long.
  constexpr bool kTwoChains = kMTiles == 1;
  for (int round = 0; round < rounds; ++round) {
    BarrierWait(base + C::kFullAt + 8 * (round % C::kStages), (round / C::kStages) & 1);
    float s[kTwoChains ? 2 : kMTiles][2][4] = {};
    const auto sum_of = [](int m, int k) { return kTwoChains ? k & 1 : m; };
    const uint32_t rope = rope_lane + round % C::kRopeStages * C::kRopeStage;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      uint32_t b[4];
      LoadMatrix4(b, rope ^ (k << 5));
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        uint32_t a[4];
        LoadMatrix4(a, (query_lane ^ (k << 5)) + m * 16 * 128);
        MmaBf16(s[sum_of(m, k)][0], a, b[0], b[1]);
        MmaBf16(s[sum_of(m, k)][1], a, b[2], b[3]);
      }
    }
    const uint32_t from = latent_lane + round % C::kStages * C::kLatentStage;
    uint32_t b[2][4];
    LoadMatrix4(b[0], from);
    LoadMatrix4(b[1], from ^ 32);
#pragma unroll
    for (int k = 0; k < 16; ++k) {
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        MmaBf16(s[sum_of(m, k)][0], q[m][k], b[k & 1][0], b[k & 1][1]);
        MmaBf16(s[sum_of(m, k)][1], q[m][k], b[k & 1][2], b[k & 1][3]);
      }
      if (k < 14) LoadMatrix4(b[k & 1], (from ^ (((k + 2) & 3) << 5)) + ((k + 2) >> 2) * 128);
    }
    if (kTwoChains) {
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) s[0][n][c] += s[1][n][c];
    }
    const int buffer = round & 1;
    const uint32_t score_lane = score_base + LaneIndex() * 16;  // anew: there is no register to keep it
    if (round >= 2) NamedBarrier(C::kScoresBarrier + buffer, 6 * 32);
      // 8 rows of scores for each owner, in the order its lanes want them.
#pragma unroll
    for (int d = 0; d < C::kOwners; ++d) {
      const int m = d >> 1, c = 2 * (d & 1);
      StoreShared4(score_lane + buffer * C::kScores + d * 512, s[m][0][c], s[m][0][c + 1], s[m][1][c],
                   s[m][1][c + 1]);
    }
    BarrierArrive(scores_full + 8 * buffer);
    BarrierArrive(base + C::kRopeEmptyAt + 8 * (round % C::kRopeStages));
  }
}

}  // namespace kdt::cuda
