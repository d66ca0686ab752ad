// The score warps of the partial kernel (partial.cuh) for more than 32 query rows: QK and the softmax, round
// by round.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/verify_attention/outputs.cuh"
#include "kernels/cuda/verify_attention/plan.cuh"
#include "kernels/cuda/verify_attention/queries.cuh"
#include "kernels/cuda/verify_attention/tall_config.cuh"

namespace kdt::cuda {

// Score warp `warp`: group = warp / 2, half of the columns = warp % 2. It does the softmax of half of the
// group's rows, its own ones, for which it gets the other warp's partial scores and gives that one the rest.
// Its fragments have its own rows first: row tile `half`, or, of a lone row tile, the upper or lower eight
// rows.
template <class C>
__device__ __forceinline__ void TallScoreWarp(const VerifyParams& p, const VerifyClass& out, const Item& it,
                                              uint32_t base, int warp) {
  constexpr int kMTiles = C::kMTiles;
  constexpr int kOwn = kMTiles;  // rows of its own that a lane has four scores of
  const int lane = threadIdx.x & 31;
  const int group = warp >> 1, half = warp & 1;
  const int rounds = __shfl_sync(~0u, KeyTiles(it.end - it.begin), 0);  // in a uniform register
  WaitForPrevious();

  // Row, within the group, of a lane's ldmatrix address in a row tile: its own rows come first.
  const auto fragment_row = [&](int m) {
    return kMTiles == 1 ? (lane & 15) ^ (half << 3) : ((m ^ half) << 4) + (lane & 15);
  };
  uint32_t q[kMTiles][16][4];
  LoadQueries<C>(p, it, base, warp, fragment_row, q);
  // The stage in which queries came in may be loaded.
  FenceBulk();
  NamedArrive(C::kTileBarrier + C::kStages - 1, 32 * C::kScoreWarps + 128);

  const uint32_t latent_lane =
      base + ((lane & 7) + ((lane >> 4) << 3)) * C::kKeyRow + half * 512 + (((lane >> 3) & 1) << 4);
  const uint32_t rope_lane = base + ((lane & 7) + ((lane >> 4) << 3)) * C::kKeyRow + kLatent * 2 + half * 64 +
                             (((lane >> 3) & 1) << 4);
  const auto query_of = [&](int l) {
    return base + C::kQueryRopeAt +
           (group * C::kGroupRows + (kMTiles == 1 ? (l & 15) ^ (half << 3) : (half << 4) + (l & 15))) * 128 +
           (((4 * half + (l >> 4)) ^ (l & 7)) << 4);
  };
  // On sm_120 the assembler has no register to keep this address.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  constexpr bool kAnew = true;
#else
  constexpr bool kAnew = false;
#endif
  const uint32_t query_once = query_of(lane);
  const uint32_t group_at = base + C::kGroupAt + group * C::kGroupBytes;
  const uint32_t probs_full = base + C::kProbsFullAt + group * 16;
  // Rounds that need no mask.
  const int dense_rounds = __shfl_sync(~0u, max(0, min(it.context, it.end) - it.begin) / kTileKeys, 0);
  const auto own_row = [&](int i) {  // within the group
    return (kMTiles == 1 ? 8 * half : 16 * half + 8 * i) + (LaneIndex() >> 2);
  };

  float reference[kOwn], sum[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) reference[i] = kNoReference, sum[i] = 0.0f;
  // A lone row tile has sums of its own for odd steps: chains of products half as long.
  constexpr bool kTwoChains = kMTiles == 1;
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    BarrierWait(base + C::kFullAt + 8 * (round % C::kStages), (round / C::kStages) & 1);
    float s[kTwoChains ? 2 : kMTiles][2][4] = {};
    const auto sum_of = [](int m, int k) { return kTwoChains ? k & 1 : m; };
    const uint32_t query_lane = kAnew ? query_of(LaneIndex()) : query_once;
    const uint32_t rope = rope_lane + round % C::kStages * C::kStageBytes;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      uint32_t b[4];
      LoadMatrix4(b, rope + k * 32);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        uint32_t a[4];
        LoadMatrix4(a, (query_lane ^ (k << 5)) + (m == 0 ? 0 : (1 - 2 * half) * 16 * 128));
        MmaBf16(s[sum_of(m, k)][0], a, b[0], b[1]);
        MmaBf16(s[sum_of(m, k)][1], a, b[2], b[3]);
      }
    }
    const uint32_t from = latent_lane + round % C::kStages * C::kStageBytes;
    uint32_t b[2][4];
    LoadMatrix4(b[0], from);
    LoadMatrix4(b[1], from + 32);
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      // The other warp's rows first: they have further to go.
#pragma unroll
      for (int i = 0; i < kMTiles; ++i) {
        const int m = kMTiles - 1 - i;
        MmaBf16(s[sum_of(m, k)][0], q[m][k], b[k & 1][0], b[k & 1][1]);
        MmaBf16(s[sum_of(m, k)][1], q[m][k], b[k & 1][2], b[k & 1][3]);
      }
      if (k < 14) LoadMatrix4(b[k & 1], from + (k + 2) * 32);
      if (C::kPaced && k == C::kPaceStep && round > 0 && LaneIndex() == 0)
        BarrierArrive(base + C::kGoAt + group * 16 + 8 * ((round - 1) & 1));
    }
    if (kTwoChains) {
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) s[0][n][c] += s[1][n][c];
    }
    const int buffer = round & 1;
    const uint32_t group_lane = group_at + LaneIndex() * 16;
    const uint32_t exchange_lane = group_lane + buffer * C::kExchange;
    // Row i of this lane's own ones (mine) or of its others.
    const auto score = [&](bool mine, int i, int k) -> float& {
      return kMTiles == 1 ? s[0][k >> 1][(mine ? 0 : 2) + (k & 1)] : s[mine ? 0 : 1][k >> 1][2 * i + (k & 1)];
    };
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      StoreShared4(exchange_lane + (half * kOwn + i) * 512, score(false, i, 0), score(false, i, 1),
                   score(false, i, 2), score(false, i, 3));
    }
    // Both warps have stored their scores, and the probabilities of two rounds ago have been read.
    NamedBarrier(C::kExchangeBarrier + 2 * group + buffer, round < 2 ? 64 : 192);
    if (round >= dense_rounds) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        int visible = 0;
#pragma unroll 1
        for (int k = 0; k < 4; ++k) {
          const int key = it.begin + round * kTileKeys + 2 * (LaneIndex() & 3) + (k & 1) + 4 * (k & 2);
          const int flat = it.tile * C::kTileRows + group * C::kGroupRows + own_row(i);
          visible |= Visible(p, it, RowOf(p, min(flat, it.rows * p.heads - 1)), key) << k;
        }
#pragma unroll
        for (int k = 0; k < 4; ++k)
          if ((visible >> k & 1) == 0) score(true, i, k) = -INFINITY;
      }
    }
    float x[kOwn][4], top[kOwn];  // scores from their references, and their exponentials
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float4 y = LoadShared4(exchange_lane + ((1 - half) * kOwn + i) * 512);
      score(true, i, 0) += y.x, score(true, i, 1) += y.y, score(true, i, 2) += y.z, score(true, i, 3) += y.w;
#pragma unroll
      for (int k = 0; k < 4; ++k) x[i][k] = fmaf(score(true, i, k), p.scale_log2, -reference[i]);
      top[i] = fmaxf(fmaxf(x[i][0], x[i][1]), fmaxf(x[i][2], x[i][3]));
#pragma unroll
      for (int k = 0; k < 4; ++k) x[i][k] = Exp2(x[i][k]);
    }
    // A reference moves when a score is far above it, which is rare.
    const bool far = (kOwn == 1 ? top[0] : fmaxf(top[0], top[kOwn - 1])) > kRescaleAbove;
    bool any_moved = __any_sync(~0u, far);
    if (any_moved) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        float highest =
            fmaxf(fmaxf(score(true, i, 0), score(true, i, 1)), fmaxf(score(true, i, 2), score(true, i, 3)));
        highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
        // The same number that was looked at above, so that a row does not move by what the warp's others
        // have.
        const bool moves = fmaf(highest, p.scale_log2, -reference[i]) > kRescaleAbove;
        const float next = moves ? highest * p.scale_log2 : reference[i];
        const float factor = Exp2(reference[i] - next);
        reference[i] = next;
        sum[i] *= factor;
        if ((LaneIndex() & 3) == 0)
          StoreShared(group_at + C::kFactorsAt + buffer * C::kFactors + own_row(i) * 4, factor);
#pragma unroll
        for (int k = 0; k < 4; ++k) x[i][k] = Exp2(fmaf(score(true, i, k), p.scale_log2, -next));
      }
      any_moved = round > 0;  // in the first round the outputs are zero
    }
    uint32_t high[kOwn][2], low[kOwn][2];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      sum[i] += (x[i][0] + x[i][1]) + (x[i][2] + x[i][3]);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        high[i][k] = PackBf16(x[i][2 * k], x[i][2 * k + 1]);
        low[i][k] = PackBf16(x[i][2 * k] - LowBf16(high[i][k]), x[i][2 * k + 1] - HighBf16(high[i][k]));
      }
    }
    const uint32_t to = group_lane + C::kProbsAt + buffer * C::kProbs;
    if constexpr (kMTiles == 1) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        StoreShared(to + half * 4 + k * 8, __uint_as_float(high[0][k]));
        StoreShared(to + half * 4 + k * 8 + C::kProbPart, __uint_as_float(low[0][k]));
      }
    } else {
      StoreShared4U(to + half * 512, make_uint4(high[0][0], high[1][0], high[0][1], high[1][1]));
      StoreShared4U(to + half * 512 + C::kProbPart, make_uint4(low[0][0], low[1][0], low[0][1], low[1][1]));
    }
    if (LaneIndex() == 0)
      StoreShared(group_at + C::kFactorsAt + buffer * C::kFactors + C::kGroupRows * 4 + half * 4,
                  any_moved ? 1.0f : 0.0f);
    BarrierArrive(probs_full + 8 * buffer);
  }
  if (C::kPaced && LaneIndex() == 0) BarrierArrive(base + C::kGoAt + group * 16 + 8 * ((rounds - 1) & 1));
  // The value warps have two rounds and their stores to go: as long as the reduce kernel takes to plan.
  // Earlier its blocks, and those of what comes behind, would take room and memory bandwidth from this
  // kernel.
  LaunchDependents();

#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
    sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
    if ((LaneIndex() & 3) != 0) continue;
    if (it.splits == 1) {
      StoreShared(group_at + C::kReferencesAt + own_row(i) * 4, InverseOf(sum[i]));
    } else {
      out.partial_ml[static_cast<int64_t>(blockIdx.x) * C::kTileRows + group * C::kGroupRows + own_row(i)] =
          make_float2(reference[i], sum[i]);
    }
  }
  if (it.splits == 1) NamedArrive(C::kInversesBarrier + group, 6 * 32);
}

}  // namespace kdt::cuda
