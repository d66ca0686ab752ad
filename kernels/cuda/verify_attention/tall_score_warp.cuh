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

  const uint32_t group_at = base + C::kGroupAt + group * C::kGroupBytes;
  // A lane's addresses come out of shuffles, or the assembler would compute them from the lane's number,
  // which is slow to read, wherever they are used.
  const uint32_t mine = __shfl_sync(~0u, group_at + half * C::kHalf + LaneIndex() * 16,
                                    LaneIndex());  // of its pieces: tall_config.cuh
  const auto first_lane = [&] { return mine == group_at + half * C::kHalf; };
  const auto rope_piece = [](int i) { return i / kMTiles * 2 * C::kHalf + i % kMTiles * C::kPiece; };
  {
    // The rope parts of the queries came in rows; put them into the order of fragments.
    const int l = LaneIndex();
    const uint32_t from = group_at + C::kFragmentsAt +
                          (kMTiles == 1 ? (l & 15) ^ (half << 3) : (half << 4) + (l & 15)) * 128 +
                          (((4 * half + (l >> 4)) ^ (l & 7)) << 4);
    uint32_t a[2 * kMTiles][4];
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; ++i)
      LoadMatrix4(a[i], (from ^ (i / kMTiles << 5)) + i % kMTiles * (1 - 2 * half) * 16 * 128);
    NamedBarrier(C::kQueryBarrier, 32 * C::kScoreWarps);
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; ++i)
      StoreShared4U(mine + C::kFragmentsAt + rope_piece(i), make_uint4(a[i][0], a[i][1], a[i][2], a[i][3]));
  }
  const int l = LaneIndex();
  const uint32_t latent_lane = __shfl_sync(
      ~0u, base + ((l & 7) + ((l >> 4) << 3)) * C::kKeyRow + half * 512 + (((l >> 3) & 1) << 4), l);
  const int rope_from_latent = kLatent * 2 + half * (64 - 512);
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
    const uint32_t from = latent_lane + round % C::kStages * C::kStageBytes;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      uint32_t b[4];
      LoadMatrix4(b, from + rope_from_latent + k * 32);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        const uint4 v = LoadShared4U(mine + C::kFragmentsAt + rope_piece(k * kMTiles + m));
        const uint32_t a[4] = {v.x, v.y, v.z, v.w};
        MmaBf16(s[sum_of(m, k)][0], a, b[0], b[1]);
        MmaBf16(s[sum_of(m, k)][1], a, b[2], b[3]);
      }
    }
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
      if (C::kPaced && k == C::kPaceStep && round > 0 && first_lane())
        BarrierArrive(base + C::kGoAt + group * 16 + 8 * ((round - 1) & 1));
    }
    if (kTwoChains) {
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) s[0][n][c] += s[1][n][c];
    }
    const int buffer = round & 1;
    const uint32_t own = mine + buffer * C::kExchange;  // scores it gets, and from there its probabilities
    // Row i of this lane's own ones or of its others.
    const auto score = [&](bool its_own, int i, int k) -> float& {
      return kMTiles == 1 ? s[0][k >> 1][(its_own ? 0 : 2) + (k & 1)]
                          : s[its_own ? 0 : 1][k >> 1][2 * i + (k & 1)];
    };
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      StoreShared4(own + (1 - 2 * half) * C::kHalf + i * C::kPiece, score(false, i, 0), score(false, i, 1),
                   score(false, i, 2), score(false, i, 3));
    }
    // Both warps have stored their scores, and the probabilities of two rounds ago have been read.
    NamedBarrier(C::kExchangeBarrier + 2 * group + buffer, round < 2 ? 64 : 192);
    if (round >= dense_rounds) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        int visible = 0;
#pragma unroll 2  // rolled up whole, it makes the assembler keep the warp's number in vector registers
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
      const float4 y = LoadShared4(own + i * C::kPiece);
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
    if (first_lane())
      StoreShared(group_at + C::kFactorsAt + buffer * C::kFactors + C::kGroupRows * 4 + half * 4,
                  any_moved ? 1.0f : 0.0f);
    uint32_t high[kOwn][2], low[kOwn][2];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        high[i][k] = PackBf16(x[i][2 * k], x[i][2 * k + 1]);
        low[i][k] = PackBf16(x[i][2 * k] - LowBf16(high[i][k]), x[i][2 * k + 1] - HighBf16(high[i][k]));
      }
    }
    const uint32_t to = own + C::kProbsAt;
    if constexpr (kMTiles == 1) {  // both warps have words of both pieces
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        StoreShared(to + half * (4 - C::kPiece) + k * 8, __uint_as_float(high[0][k]));
        StoreShared(to + half * (4 - C::kPiece) + k * 8 + C::kPiece, __uint_as_float(low[0][k]));
      }
    } else {
      StoreShared4U(to, make_uint4(high[0][0], high[1][0], high[0][1], high[1][1]));
      StoreShared4U(to + C::kPiece, make_uint4(low[0][0], low[1][0], low[0][1], low[1][1]));
    }
    BarrierArrive(probs_full + 8 * buffer);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) sum[i] += (x[i][0] + x[i][1]) + (x[i][2] + x[i][3]);
  }
  if (C::kPaced && first_lane()) BarrierArrive(base + C::kGoAt + group * 16 + 8 * ((rounds - 1) & 1));
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
  if (it.splits == 1) BarrierArrive(base + C::kInversesFullAt + group * 8);
}

}  // namespace kdt::cuda
