// The value warps of the partial kernel (partial.cuh): loading, softmax, P x V, and the result or a partial
// of it.
#pragma once

#include <type_traits>

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/verify_attention/config.cuh"
#include "kernels/cuda/verify_attention/plan.cuh"

namespace kdt::cuda {

// Whether the query at row `row` (within the sequence) sees `key`; keys from `context` on are the sequence's
// own rows.
__device__ inline bool Visible(const VerifyParams& p, const Item& it, int row, int key) {
  if (key >= it.end) return false;
  if (key < it.context) return true;
  const int node = key - it.context;
  if (p.causal[it.sequence] != 0) return node <= row;
  const uint64_t* bits = p.ancestor_bits + static_cast<int64_t>(it.row0 + row) * 4;
  return (bits[node >> 6] >> (node & 63)) & 1;
}

// Stores the first `owners` eighths of a warp's outputs in float16, brought to the largest exponent that
// holds a row's part. With e = that exponent less 14, the values are O 2^-e, the reference m + e and the sum
// l 2^-e: sum_i 2^(m_i - M) O_i and the same sum of l_i, from which the result comes, both keep their
// meaning. `row_results` has m and l of the group's rows, 512 bytes apart for every 8.
template <class C>
__device__ __forceinline__ void StoreHalves(const VerifyClass& out, const float (&o)[C::kMTiles][16][4],
                                            uint32_t row_results, int64_t first, int group, int w,
                                            int owners) {
  const int lane = threadIdx.x & 31, g = lane >> 2;
#pragma unroll
  for (int d = 0; d < C::kOwners; ++d) {
    if (d >= owners) break;
    const int m = d >> 1, c = 2 * (d & 1);
    float top = 0.0f;
#pragma unroll
    for (int n = 0; n < 16; ++n) top = fmaxf(top, fmaxf(fabsf(o[m][n][c]), fabsf(o[m][n][c + 1])));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const int e = max(-100, min(112, static_cast<int>(__float_as_uint(top) >> 23) - 127 - 14));
    const float factor = __uint_as_float(static_cast<uint32_t>(127 - e) << 23);
#pragma unroll
    for (int n4 = 0; n4 < 4; ++n4) {
      uint32_t h[4];
#pragma unroll
      for (int k = 0; k < 4; ++k)
        h[k] = PackHalf(o[m][4 * n4 + k][c] * factor, o[m][4 * n4 + k][c + 1] * factor);
      out.partial[first + (d * 4 + n4) * 32] = make_uint4(h[0], h[1], h[2], h[3]);
    }
    if ((lane & 3) == 0) {
      const float2 ml = LoadShared2(row_results + d * 512 + g * 8);
      out.partial_ml[(static_cast<int64_t>(blockIdx.x) * 4 + w) * C::kTileRows + group * C::kGroupRows +
                     8 * d + g] = make_float2(ml.x + static_cast<float>(e), ml.y * factor);
    }
  }
}

// Value warp: group = warp / 4, 128 output columns = warp % 4.
template <class C>
__device__ __forceinline__ void ValueWarp(const VerifyParams& p, const VerifyClass& out, const Item& it,
                                          uint32_t base, int warp) {
  constexpr int kMTiles = C::kMTiles;
  static_assert(C::kStages % C::kGroups == 0 ||
                C::kGroups == 1);  // a stage is always loaded by the same group
  const int lane = threadIdx.x & 31;
  const int group = warp >> 2, w = warp & 3;
  const int g = lane >> 2, t = lane & 3;
  const int rounds = KeyTiles(it.end - it.begin);
  const int dense_rounds =
      max(0, min(it.context, it.end) - it.begin) / kTileKeys;  // rounds that need no mask
  const int first_flat = it.tile * C::kTileRows + group * C::kGroupRows;
  const uint32_t full = base + C::kFullAt;
  const uint32_t scores_full = base + C::kScoresFullAt + group * 16;
  // Scores of a round have been read; score warps want to know if they have two more rounds.
  const auto release_scores = [&](int round) {
    if (round + 2 < rounds) NamedArrive(C::kScoresBarrier + 2 * group + (round & 1), 6 * 32);
  };

  // Loading. Eight lanes a row; a register holds the slots of the rows this warp loads in its next eight
  // turns. Keys past the end repeat the last one (their scores are masked, and what they would add must be
  // finite).
  const int load_key = w * 4 + (lane >> 3), load_chunk = lane & 7;
  const uint32_t load_lane = base + C::kLatentAt + load_key * 1024 + ((load_chunk ^ (load_key & 7)) << 4);
  const uint32_t load_rope_lane = base + C::kRopeAt + load_key * 128 + ((load_chunk ^ (load_key & 7)) << 4);
  const uint8_t* const load_from = reinterpret_cast<const uint8_t*>(p.pool) + load_chunk * 16;
  auto slots_of = [&](int turn) {
    const int key = it.begin + ((turn + (lane >> 2)) * C::kGroups + group) * kTileKeys + w * 4 + (lane & 3);
    return p.slot_table[it.sequence * p.table_stride + min(key, it.end - 1)];
  };
  int slots = slots_of(0), slots_next = slots_of(8);
  auto load = [&](int round) {
    const int turn = round / C::kGroups;
    if (turn % 8 == 0 && turn > 0) {
      slots = slots_next;
      slots_next = slots_of(turn + 8);
    }
    const int slot = __shfl_sync(~0u, slots, turn % 8 * 4 + (lane >> 3));
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
    if (r >= rounds || r % C::kGroups != group) continue;
    if (it.begin + (r + 1) * kTileKeys > it.context) WaitForPrevious();
    load(r);
  }
  WaitForPrevious();

  float o[kMTiles][16][4];
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) o[m][n][c] = 0.0f;
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
  const uint32_t score_lane =
      base + C::kScoresAt + group * 2 * C::kScores + (w % C::kOwners) * 512 + lane * 16;
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
    // The sum is of what goes into P x V, so that the weights of a row add up to one exactly.
    sum += C::kProbParts == 2 ? (x[0] + x[1]) + (x[2] + x[3])
                              : (LowBf16(p0) + HighBf16(p0)) + (LowBf16(p1) + HighBf16(p1));
    if (w < C::kOwners) {
      const uint32_t to =
          base + C::kProbsAt + (group * 2 + parity) * C::kProbs + (w >> 1) * 512 + lane * 16 + (w & 1) * 4;
      StoreShared(to, __uint_as_float(p0));
      StoreShared(to + 8, __uint_as_float(p1));
      if (C::kProbParts == 2) {
        const uint32_t rest = to + C::kProbPart;
        StoreShared(rest, __uint_as_float(PackBf16(x[0] - LowBf16(p0), x[1] - HighBf16(p0))));
        StoreShared(rest + 8, __uint_as_float(PackBf16(x[2] - LowBf16(p1), x[3] - HighBf16(p1))));
      }
      if (t == 0)
        StoreShared(base + C::kFactorsAt + (group * 2 + parity) * C::kFactors + (8 * w + g) * 4, factor);
    }
  };
  // When a reference moved, the outputs so far are brought to the new one.
  auto rescale_outputs = [&](int parity) {
    const uint32_t from = base + C::kFactorsAt + (group * 2 + parity) * C::kFactors + g * 4;
#pragma unroll
    for (int d = 0; d < C::kOwners; ++d) {
      const float f = LoadShared(from + 32 * d);
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        o[d >> 1][n][2 * (d & 1)] *= f;
        o[d >> 1][n][2 * (d & 1) + 1] *= f;
      }
    }
  };
  // P x V of a round; between(j) runs behind its j-th eighth.
  const uint32_t value_lane = base + C::kLatentAt + ((lane & 7) + (((lane >> 3) & 1) << 3)) * 1024 + w * 256 +
                              (((lane >> 4) ^ (lane & 7)) << 4);
  auto values = [&](int round, int parity, auto&& between) {
    const uint32_t from = value_lane + round % C::kStages * C::kLatentStage;
    uint32_t a[C::kProbParts][kMTiles][4], b[2][4];
#pragma unroll
    for (int i = 0; i < C::kProbParts; ++i) {
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        const uint4 v = LoadShared4U(base + C::kProbsAt + (group * 2 + parity) * C::kProbs +
                                     i * C::kProbPart + m * 512 + lane * 16);
        a[i][m][0] = v.x, a[i][m][1] = v.y, a[i][m][2] = v.z, a[i][m][3] = v.w;
      }
    }
    LoadMatrix4Transposed(b[0], from);
    LoadMatrix4Transposed(b[1], from ^ 32);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < C::kProbParts; ++i) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
          MmaBf16(o[m][2 * j], a[i][m], b[j & 1][0], b[j & 1][1]);
          MmaBf16(o[m][2 * j + 1], a[i][m], b[j & 1][2], b[j & 1][3]);
        }
      }
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
  // A round's products with the next one's softmax between them. The assembler keeps the order of shared
  // loads across __syncwarp only; without it all of the softmax may end up before the products. In the large
  // configuration the last round is a step like the others, whose next round sees no key: a copy of its
  // products would spill.
  constexpr bool kLarge = C::kProbParts == 1;
  const auto step = [&](int round, auto masked) {
    const int parity = round & 1, next = round + 1;
    const bool any_moved = NamedBarrierOr(C::kProbsBarrier + group, 128, moved);
    const int fetch = round + C::kStages - 1;
    if (fetch < rounds && fetch % C::kGroups == group) {
      // This group has read the tile that goes: the barrier above says so. The first load into the last stage
      // also replaces the queries' staging: they are in once a rope part is released.
      if (C::kGroups == 2 && fetch >= C::kStages) NamedBarrier(C::kTileBarrier + fetch % C::kStages, 256);
      BarrierWait(base + C::kRopeEmptyAt + 8 * (fetch % C::kRopeStages), (fetch / C::kRopeStages - 1) & 1);
      load(fetch);
    }
    if (any_moved) rescale_outputs(parity);
    const int bits = decltype(masked)::value ? visible(next) : 15;
    if (!decltype(masked)::value || next < rounds) BarrierWait(scores_full + 8 * (next & 1), (next >> 1) & 1);
    float x[4], top;
    values(round, parity, [&](int j) {
      switch (j) {
        case 1: {
          if (kLarge) __syncwarp();
          const float4 low = load_scores(next & 1, 0);
          x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
          break;
        }
        case 2:
          if (kLarge) __syncwarp();
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
    if (C::kGroups == 2 && round % 2 != group && round + C::kStages < rounds)
      NamedArrive(C::kTileBarrier + round % C::kStages, 256);
  };
  int round = 0;
  // The middle configuration has no registers left for two loops.
  if constexpr (C::kMTiles == 1 || kLarge) {
#pragma unroll 1
    for (; round + 1 < dense_rounds; ++round) step(round, std::false_type{});
  }
#pragma unroll 1
  for (; round + (kLarge ? 0 : 1) < rounds; ++round) step(round, std::true_type{});
  if constexpr (!kLarge) {
    if (NamedBarrierOr(C::kProbsBarrier + group, 128, moved)) rescale_outputs((rounds - 1) & 1);
    values(rounds - 1, (rounds - 1) & 1, [](int) {});
  }

  // The result itself (one split) or a partial of it.
  const int flat_rows = it.rows * p.heads;
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  // References and sums for the other warps, in the place of the last scores of the same rows.
  const uint32_t row_results = base + C::kScoresAt + group * 2 * C::kScores + ((rounds - 1) & 1) * C::kScores;
  if (C::kHalves && it.splits > 1) {
    if (t == 0) StoreShared2(row_results + w * 512 + g * 8, reference, sum);
    NamedBarrier(C::kProbsBarrier + group, 128);
  }
  if (it.splits == 1) {
    const uint32_t inverses = base + C::kFactorsAt + group * 2 * C::kFactors;
    NamedBarrier(C::kProbsBarrier + group, 128);  // all warps have read the last factors
    if (w < C::kOwners && t == 0)
      StoreShared(inverses + (8 * w + g) * 4, sum > 0.0f || sum != sum ? 1.0f / sum : 0.0f);
    NamedBarrier(C::kProbsBarrier + group, 128);
#pragma unroll
    for (int d = 0; d < C::kOwners; ++d) {
      const int flat = first_flat + 8 * d + g;
      if (flat >= flat_rows) continue;
      const float inverse = LoadShared(inverses + (8 * d + g) * 4);
      const int row = RowOf(p, flat);
      uint16_t* to =
          p.out + (it.row0 + row) * p.out_stride + (flat - row * p.heads) * kLatent + 128 * w + 2 * t;
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        *reinterpret_cast<uint32_t*>(to + 8 * n) =
            PackBf16(o[d >> 1][n][2 * (d & 1)] * inverse, o[d >> 1][n][2 * (d & 1) + 1] * inverse);
      }
    }
    return;
  }
  if constexpr (C::kHalves) {
    const int64_t first =
        (static_cast<int64_t>(blockIdx.x) * C::kTileRows + (group * 4 + w) * 4 * kMTiles) * 64 + lane;
    StoreHalves<C>(out, o, row_results, first, group, w, (flat_rows - first_flat + 7) / 8);
  } else {
    const int64_t item_row = static_cast<int64_t>(blockIdx.x) * C::kTileRows + group * C::kGroupRows;
    if (w < C::kOwners && t == 0) out.partial_ml[item_row + 8 * w + g] = make_float2(reference, sum);
    const int64_t first =
        (static_cast<int64_t>(blockIdx.x) * C::kTileRows + (group * 4 + w) * 4 * kMTiles) * 64 + lane;
    uint4* const high = out.partial + first;
    uint2* const low = out.partial_low + first;
#pragma unroll
    for (int d = 0; d < C::kOwners; ++d) {
      if (first_flat + 8 * d >= flat_rows) break;
      const int m = d >> 1, c = 2 * (d & 1);
#pragma unroll
      for (int n4 = 0; n4 < 4; ++n4) {
        uint32_t x[8], h[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          x[2 * k] = __float_as_uint(o[m][4 * n4 + k][c]);
          x[2 * k + 1] = __float_as_uint(o[m][4 * n4 + k][c + 1]);
          h[k] = __byte_perm(x[2 * k], x[2 * k + 1], 0x7632);
        }
        high[(d * 4 + n4) * 32] = make_uint4(h[0], h[1], h[2], h[3]);
        // The next eight bits of each value; the last eight are dropped.
        const auto third_bytes = [](const uint32_t* v) {
          return __byte_perm(__byte_perm(v[0], v[1], 0x0051), __byte_perm(v[2], v[3], 0x0051), 0x5410);
        };
        low[(d * 4 + n4) * 32] = make_uint2(third_bytes(x), third_bytes(x + 4));
      }
    }
  }
}

}  // namespace kdt::cuda
