// The value warps of the partial kernel (partial.cuh) for more than 32 query rows: loading, P x V, and the
// result or a partial of it.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/verify_attention/outputs.cuh"
#include "kernels/cuda/verify_attention/plan.cuh"
#include "kernels/cuda/verify_attention/tall_config.cuh"

namespace kdt::cuda {

// Value warp: group = warp / 4, 128 output columns = warp % 4.
template <class C>
__device__ __forceinline__ void TallValueWarp(const VerifyParams& p, const VerifyClass& out, const Item& it,
                                              uint32_t base, int warp) {
  constexpr int kMTiles = C::kMTiles;
  const int lane = threadIdx.x & 31;
  const int group = warp >> 2, w = warp & 3;
  const int rounds = __shfl_sync(~0u, KeyTiles(it.end - it.begin), 0);
  const uint32_t full = base + C::kFullAt;
  const uint32_t group_at = base + C::kGroupAt + group * C::kGroupBytes;
  const uint32_t probs_full = base + C::kProbsFullAt + group * 16;

  // Loading. Four keys a warp and turn; a register holds the slots of those of its next eight turns. Keys
  // past the end repeat the last one (their scores are masked, and what they would add must be finite).
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
    const int slot = __shfl_sync(~0u, slots, turn % 8 * 4 + (lane & 3));
    const uint32_t barrier = full + 8 * (round % C::kStages);
    if (lane == 0) BarrierExpect(barrier, 4 * C::kKeyBytes);
    __syncwarp();
    if (lane < 4) {
      CopyBulk(base + round % C::kStages * C::kStageBytes + (w * 4 + lane) * C::kKeyRow,
               reinterpret_cast<const uint8_t*>(p.pool) + static_cast<int64_t>(slot) * p.pool_stride_bytes,
               C::kKeyBytes, barrier);
    }
  };
  // Committed rows were there before this step began; the sequence's own rows come from the kernels in front.
#pragma unroll
  for (int r = 0; r < C::kStages - 1; ++r) {
    if (r >= rounds || r % C::kGroups != group) continue;
    if (it.begin + (r + 1) * kTileKeys > it.context) WaitForPrevious();
    load(r);
  }
  WaitForPrevious();

  float o[kMTiles][16][4] = {};

  const uint32_t value_lane = base + (lane & 15) * C::kKeyRow + w * 256 + ((lane >> 4) << 4);
  // Replaces the tile of the round before.
  auto refill = [&](int round) {
    const int fetch = round + C::kStages - 1;
    if (fetch < rounds && fetch % C::kGroups == group) {
      // All value warps have read the tile that goes; out of the last stage, all score warps their queries.
      NamedBarrier(C::kTileBarrier + fetch % C::kStages,
                   fetch >= C::kStages ? 128 * C::kGroups : 128 + 32 * C::kScoreWarps);
      if (fetch >= C::kStages) NamedBarrier(C::kLoadBarrier + group, 128);  // for racecheck: tall_config.cuh
      load(fetch);
    }
  };
  uint32_t b[2][4];
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    const int buffer = round & 1;
    const uint32_t from = value_lane + round % C::kStages * C::kStageBytes;
    BarrierWait(probs_full + 8 * buffer, (round >> 1) & 1);
    if (C::kPaced)  // not as soon as there is something to do: tall_config.cuh
      BarrierWait(base + C::kGoAt + group * 16 + 8 * buffer, (round >> 1) & 1);
    refill(round);
    const uint32_t factors = group_at + C::kFactorsAt + buffer * C::kFactors;
    const float2 moved = LoadShared2(factors + C::kGroupRows * 4);
    uint32_t a[2][kMTiles][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        const uint4 v = LoadShared4U(group_at + C::kProbsAt + buffer * C::kProbs + m * C::kHalf +
                                     i * C::kPiece + LaneIndex() * 16);
        a[i][m][0] = v.x, a[i][m][1] = v.y, a[i][m][2] = v.z, a[i][m][3] = v.w;
      }
    }
    LoadMatrix4Transposed(b[0], from);
    LoadMatrix4Transposed(b[1], from + 32);
    // When a reference moved, the outputs so far are brought to the new one.
    const auto rescale = [&](int first) {
#pragma unroll
      for (int d = first; d < first + kMTiles; ++d) {
        Rescale(o, d, LoadShared(factors + (8 * d + (LaneIndex() >> 2)) * 4));
      }
    };
    if (moved.x != 0.0f) rescale(0);
    if (moved.y != 0.0f) rescale(kMTiles);
    if (C::kPaced && round + 2 < rounds) NamedArrive(C::kExchangeBarrier + 2 * group + buffer, 6 * 32);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      AddProducts(o, a, b[j & 1], j);
      if (j < 6) LoadMatrix4Transposed(b[j & 1], from + (j + 2) * 32);
      // Probabilities have been read; score warps want to know if they have two more rounds.
      if (!C::kPaced && j == 0 && round + 2 < rounds)
        NamedArrive(C::kExchangeBarrier + 2 * group + buffer, 6 * 32);
    }
    if (round % 2 != group && round + C::kStages < rounds)
      NamedArrive(C::kTileBarrier + round % C::kStages, 256);
  }

  // The result itself (one split) or a partial of it.
  if (it.splits == 1) {
    BarrierWait(base + C::kInversesFullAt + group * 8, 0);
    StoreResult<C>(p, it, group_at + C::kReferencesAt, group, w, o);
  } else {
    StorePartial<C>(p, out, it, group, w, o);
  }
}

}  // namespace kdt::cuda
