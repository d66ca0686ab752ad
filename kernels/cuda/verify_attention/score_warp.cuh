// The score warps of the partial kernel (partial.cuh): queries into registers, then QK round by round.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/verify_attention/config.cuh"
#include "kernels/cuda/verify_attention/plan.cuh"

namespace kdt::cuda {

// Score warp `warp`: group = warp / 2, half of the columns = warp % 2.
template <class C>
__device__ __forceinline__ void ScoreWarp(const VerifyParams& p, const Item& it, uint32_t base, int warp) {
  constexpr int kMTiles = C::kMTiles;
  const int lane = threadIdx.x & 31;
  const int group = warp >> 1, half = warp & 1;
  const int rounds = __shfl_sync(~0u, KeyTiles(it.end - it.begin), 0);  // in a uniform register
  WaitForPrevious();

  // Queries, 64 columns at a time: rows come in with 16-byte loads and leave as A fragments.
  uint32_t q[kMTiles][16][4];
  {
    const int first_flat = it.tile * C::kTileRows + group * C::kGroupRows;
    const int flat_rows = it.rows * p.heads;
    const uint32_t staging = base + C::kStagingAt + warp * C::kStagingParts * C::kStagingPiece;
    constexpr int kLoads = kMTiles * 4;  // a lane's 16-byte loads for 64 columns
    uint4 in[4][kLoads];
    int src[kLoads];  // elements from p.q, negative: no such row
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int flat = first_flat + i * 4 + (lane >> 3);
      const int row = RowOf(p, flat);
      src[i] = flat < flat_rows ? (it.row0 + row) * static_cast<int>(p.q_stride) +
                                      (flat - row * p.heads) * kKeyWidth + (lane & 7) * 8
                                : -kKeyWidth;
    }
    auto fetch = [&](int column, uint4(&to)[kLoads]) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        to[i] = src[i] >= 0 ? *reinterpret_cast<const uint4*>(p.q + src[i] + column) : make_uint4(0, 0, 0, 0);
      }
    };
    auto put = [&](uint32_t to, const uint4(&from)[kLoads]) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int row = i * 4 + (lane >> 3);
        StoreShared4U(to + row * 128 + (((lane & 7) ^ (row & 7)) << 4), from[i]);
      }
    };
    // Everything is on its way before anything is needed: a part's registers become its fragments'.
    if (half == 0) {
      const uint32_t to = base + C::kQueryRopeAt + group * C::kGroupRows * 128;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int row = i * 4 + (lane >> 3);
        const uint32_t at = to + row * 128 + (((lane & 7) ^ (row & 7)) << 4);
        if (src[i] >= 0) {
          CopyAsync16(at, p.q + src[i] + kLatent);
        } else {
          StoreShared4U(at, make_uint4(0, 0, 0, 0));
        }
      }
    }
#pragma unroll
    for (int part = 0; part < 4; ++part) fetch(half * 256 + part * 64, in[part]);
#pragma unroll
    for (int first = 0; first < 4; first += C::kStagingParts) {
      if (first > 0) __syncwarp();
#pragma unroll
      for (int i = 0; i < C::kStagingParts; ++i) put(staging + i * C::kStagingPiece, in[first + i]);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < C::kStagingParts; ++i) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int row = 16 * m + (lane & 15);
            LoadMatrix4(q[m][(first + i) * 4 + k], staging + i * C::kStagingPiece + row * 128 +
                                                       (((2 * k + (lane >> 4)) ^ (row & 7)) << 4));
          }
        }
      }
    }
    CopyAsyncWait();
    NamedBarrier(C::kQueryBarrier, 32 * C::kScoreWarps);  // the rope part is shared
  }

  const uint32_t latent_lane = Pinned(base + C::kLatentAt + ((lane & 7) + ((lane >> 4) << 3)) * 1024 +
                                      half * 512 + ((((lane >> 3) & 1) ^ (lane & 7)) << 4));
  const uint32_t rope_lane = base + C::kRopeAt + ((lane & 7) + ((lane >> 4) << 3)) * 128 +
                             (((4 * half + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
  const uint32_t query_lane = base + C::kQueryRopeAt + (group * C::kGroupRows + (lane & 15)) * 128 +
                              (((4 * half + (lane >> 4)) ^ (lane & 7)) << 4);
  const uint32_t score_base = base + C::kScoresAt + group * 2 * C::kScores + half * C::kScoreHalf;
  const uint32_t scores_full = base + C::kScoresFullAt + group * 16;

  // A lone row tile has sums of its own for odd steps: chains of products half as long.
  constexpr bool kTwoChains = kMTiles == 1;
  for (int round = 0; round < rounds; ++round) {
    BarrierWait(base + C::kFullAt + 8 * (round % C::kStages), (round / C::kStages) & 1);
    float s[kTwoChains ? 2 : kMTiles][2][4];
    const auto sum_of = [](int m, int k) { return kTwoChains ? k & 1 : m; };
#pragma unroll
    for (int m = 0; m < (kTwoChains ? 2 : kMTiles); ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) s[m][n][c] = 0.0f;
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
    if (round >= 2) NamedBarrier(C::kScoresBarrier + 2 * group + buffer, 6 * 32);
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
  // The value warps have two rounds and their stores to go: as long as the reduce kernel takes to plan.
  // Earlier its blocks, and those of what comes behind, would take room and memory bandwidth from this
  // kernel.
  LaunchDependents();
}

}  // namespace kdt::cuda
