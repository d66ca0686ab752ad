// The value warps of the partial kernel (partial.cuh): loading, softmax, P x V, and the result or a partial
// of it.
#pragma once

#include <type_traits>

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/verify_attention/config.cuh"
#include "kernels/cuda/verify_attention/outputs.cuh"
#include "kernels/cuda/verify_attention/plan.cuh"

namespace kdt::cuda {

// Value warp `warp`: 128 output columns.
template <class C>
__device__ __forceinline__ void ValueWarp(const VerifyParams& p, const VerifyClass& out, const Item& it,
                                          uint32_t base, int warp) {
  constexpr int kMTiles = C::kMTiles;
  const int lane = threadIdx.x & 31;
  const int w = warp & 3;  // what it is already; without that the assembler runs out of registers
  const int g = lane >> 2, t = lane & 3;
  const int rounds = KeyTiles(it.end - it.begin);
  const int dense_rounds =
      max(0, min(it.context, it.end) - it.begin) / kTileKeys;  // rounds that need no mask
  const int first_flat = it.tile * C::kTileRows;
  const uint32_t full = base + C::kFullAt;
  const uint32_t scores_full = base + C::kScoresFullAt;
  // Scores of a round have been read; score warps want to know if they have two more rounds.
  const auto release_scores = [&](int round) {
    if (round + 2 < rounds) NamedArrive(C::kScoresBarrier + (round & 1), 6 * 32);
  };

  // Loading. Eight lanes a row; a register holds the slots of the rows this warp loads in its next eight
  // rounds. Keys past the end repeat the last one (their scores are masked, and what they would add must be
  // finite).
  const int load_key = w * 4 + (lane >> 3), load_chunk = lane & 7;
  const uint32_t load_lane = base + C::kLatentAt + load_key * 1024 + ((load_chunk ^ (load_key & 7)) << 4);
  const uint32_t load_rope_lane = base + C::kRopeAt + load_key * 128 + ((load_chunk ^ (load_key & 7)) << 4);
  const uint8_t* const load_from = reinterpret_cast<const uint8_t*>(p.pool) + load_chunk * 16;
  auto slots_of = [&](int round) {
    const int key = it.begin + (round + (lane >> 2)) * kTileKeys + w * 4 + (lane & 3);
    return p.slot_table[it.sequence * p.table_stride + min(key, it.end - 1)];
  };
  int slots = slots_of(0), slots_next = slots_of(8);
  auto load = [&](int round) {
    if (round % 8 == 0 && round > 0) {
      slots = slots_next;
      slots_next = slots_of(round + 8);
    }
    const int slot = __shfl_sync(~0u, slots, round % 8 * 4 + (lane >> 3));
    const uint8_t* src = load_from + static_cast<int64_t>(slot) * p.pool_stride_bytes;
    const uint32_t to = load_lane + round % C::kStages * C::kLatentStage;
#pragma unroll
    for (int i = 0; i < 8; ++i) CopyAsync16(to + i * 128, src + i * 128);
    CopyAsync16(load_rope_lane + round % C::kRopeStages * C::kRopeStage, src + kLatent * 2);
    CopyAsyncArrive(full + 8 * (round % C::kStages));
  };
  // Committed rows were there before this step began; the sequence's own rows come from the kernels in front.
#pragma unroll
  for (int r = 0; r < C::kStages - 1; ++r) {
    if (r >= rounds) continue;
    if (it.begin + (r + 1) * kTileKeys > it.context) WaitForPrevious();
    load(r);
  }
  WaitForPrevious();

  float o[kMTiles][16][4] = {};
  float reference = kNoReference, sum = 0.0f;  // of row 8 w + g
  bool moved = false;  // whether this lane's row moved its reference in the latest softmax
  float factor;

  // Which of this lane's four keys of a round its row sees; all of them in all but the last rounds.
  auto visible = [&](int round) {
    if (round < dense_rounds || w >= C::kOwners) return 15;
    if (round >= rounds) return 0;  // behind the last round
    const int row = RowOf(p, min(first_flat + 8 * w + g, it.rows * p.heads - 1));
    int bits = 0;
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      const int key = it.begin + round * kTileKeys + 2 * t + (i & 1) + 4 * (i & 2);
      bits |= Visible(p, it, row, key) << i;
    }
    return bits;
  };
  // Softmax of a round, cut into steps that other work is put between. No branches: a row's reference and
  // factor are always computed. Warps that own no rows go through the motions and store nothing.
  const uint32_t score_lane = base + C::kScoresAt + (w % C::kOwners) * 512 + lane * 16;
  auto mask_scores = [&](float(&x)[4], const float4& y, int bits) {
    x[0] += y.x, x[1] += y.y, x[2] += y.z, x[3] += y.w;
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = (bits >> i & 1) != 0 ? x[i] * p.scale_log2 : -INFINITY;
  };
  auto load_scores = [&](int buffer, int half) {
    return LoadShared4(score_lane + buffer * C::kScores + half * C::kScoreHalf);
  };
  auto row_top = [&](const float(&x)[4]) {
    const float top = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
    return fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  };
  auto move_reference = [&](float top) {
    const bool moves = top > reference + kRescaleAbove;
    moved = moves && w < C::kOwners;
    const float next = moves ? top : reference;
    factor = Exp2(reference - next);
    reference = next;
    sum *= factor;
  };
  auto store_probabilities = [&](int parity, const float(&x)[4]) {
    const uint32_t p0 = PackBf16(x[0], x[1]), p1 = PackBf16(x[2], x[3]);
    sum += (x[0] + x[1]) + (x[2] + x[3]);
    if (w < C::kOwners) {
      const uint32_t to = base + C::kProbsAt + parity * C::kProbs + (w >> 1) * 512 + lane * 16 + (w & 1) * 4;
      StoreShared(to, __uint_as_float(p0));
      StoreShared(to + 8, __uint_as_float(p1));
      const uint32_t rest = to + C::kProbPart;
      StoreShared(rest, __uint_as_float(PackBf16(x[0] - LowBf16(p0), x[1] - HighBf16(p0))));
      StoreShared(rest + 8, __uint_as_float(PackBf16(x[2] - LowBf16(p1), x[3] - HighBf16(p1))));
      if (t == 0) StoreShared(base + C::kFactorsAt + parity * C::kFactors + (8 * w + g) * 4, factor);
    }
  };
  // When a reference moved, the outputs so far are brought to the new one.
  auto rescale_outputs = [&](int parity) {
    const uint32_t from = base + C::kFactorsAt + parity * C::kFactors + g * 4;
#pragma unroll
    for (int d = 0; d < C::kOwners; ++d) Rescale(o, d, LoadShared(from + 32 * d));
  };
  // P x V of a round; between(j) runs behind its j-th eighth.
  const uint32_t value_lane = base + C::kLatentAt + ((lane & 7) + (((lane >> 3) & 1) << 3)) * 1024 + w * 256 +
                              (((lane >> 4) ^ (lane & 7)) << 4);
  auto values = [&](int round, int parity, auto&& between) {
    const uint32_t from = value_lane + round % C::kStages * C::kLatentStage;
    uint32_t a[2][kMTiles][4], b[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        const uint4 v =
            LoadShared4U(base + C::kProbsAt + parity * C::kProbs + i * C::kProbPart + m * 512 + lane * 16);
        a[i][m][0] = v.x, a[i][m][1] = v.y, a[i][m][2] = v.z, a[i][m][3] = v.w;
      }
    }
    LoadMatrix4Transposed(b[0], from);
    LoadMatrix4Transposed(b[1], from ^ 32);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      AddProducts(o, a, b[j & 1], j);
      if (j < 6) LoadMatrix4Transposed(b[j & 1], (from ^ (((j + 2) & 3) << 5)) + ((j + 2) >> 2) * 128);
      between(j);
    }
  };

  {
    const int bits = visible(0);
    BarrierWait(scores_full, 0);
    const float4 low = load_scores(0, 0);
    float x[4] = {low.x, low.y, low.z, low.w};
    mask_scores(x, load_scores(0, 1), bits);
    release_scores(0);
    float top = row_top(x);
    move_reference(fmaxf(top, __shfl_xor_sync(~0u, top, 2)));
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = Exp2(x[i] - reference);
    store_probabilities(0, x);
    moved = false;  // outputs are zero
  }
  // A round's products with the next one's softmax between them.
  const auto step = [&](int round, auto masked) {
    const int parity = round & 1, next = round + 1;
    const bool any_moved = NamedBarrierOr(C::kProbsBarrier, 128, moved);
    const int fetch = round + C::kStages - 1;
    if (fetch < rounds) {
      // All have read the tile that goes: the barrier above says so. The first load into the last stage also
      // replaces the queries' staging: they are in once a rope part is released.
      BarrierWait(base + C::kRopeEmptyAt + 8 * (fetch % C::kRopeStages), (fetch / C::kRopeStages - 1) & 1);
      load(fetch);
    }
    if (any_moved) rescale_outputs(parity);
    const int bits = decltype(masked)::value ? visible(next) : 15;
    BarrierWait(scores_full + 8 * (next & 1), (next >> 1) & 1);
    float x[4], top;
    values(round, parity, [&](int j) {
      switch (j) {
        case 1: {
          const float4 low = load_scores(next & 1, 0);
          x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
          break;
        }
        case 2:
          mask_scores(x, load_scores(next & 1, 1), bits);
          top = row_top(x);
          break;
        case 3:
          top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
          break;
        case 4:
          release_scores(next);
          move_reference(top);
#pragma unroll
          for (int i = 0; i < 4; ++i) x[i] = Exp2(x[i] - reference);
          break;
        case 6:
          store_probabilities(parity ^ 1, x);
          break;
        default:
          break;
      }
    });
  };
  int round = 0;
  // The middle configuration has no registers left for two loops.
  if constexpr (C::kMTiles == 1) {
#pragma unroll 1
    for (; round + 1 < dense_rounds; ++round) step(round, std::false_type{});
  }
#pragma unroll 1
  for (; round + 1 < rounds; ++round) step(round, std::true_type{});
  if (NamedBarrierOr(C::kProbsBarrier, 128, moved)) rescale_outputs((rounds - 1) & 1);
  values(rounds - 1, (rounds - 1) & 1, [](int) {});

  // The result itself (one split) or a partial of it.
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  if (it.splits == 1) {
    const uint32_t inverses = base + C::kFactorsAt;
    NamedBarrier(C::kProbsBarrier, 128);  // all warps have read the last factors
    if (w < C::kOwners && t == 0) StoreShared(inverses + (8 * w + g) * 4, InverseOf(sum));
    NamedBarrier(C::kProbsBarrier, 128);
    StoreResult<C>(p, it, inverses, 0, w, o);
  } else {
    if (w < C::kOwners && t == 0)
      out.partial_ml[static_cast<int64_t>(blockIdx.x) * C::kTileRows + 8 * w + g] =
          make_float2(reference, sum);
    StorePartial<C>(p, out, it, 0, w, o);
  }
}

}  // namespace kdt::cuda
