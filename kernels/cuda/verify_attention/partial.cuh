// First kernel of verify_attention: one item = 16, 32 or 64 query rows of a sequence against one split of its keys.
//
// Four warps form a group. Warp w of a group holds columns [128 w, 128 w + 128) and rope columns [16 w, 16 w + 16) of the
// group's queries in registers, and accumulates the same 128 columns of the output. A round works on 16 keys:
//   QK       each warp: partial scores over its 144 columns, for all rows of the group
//   exchange the four partial scores of a row meet in the row's owner warp (8 rows each) through shared memory
//   softmax  in the owner: mask, exp2 against a reference that moves only when a score passes it by 2^8, write P as bf16
//   PV       each warp: P x V for its 128 columns, V read from the same tile as K
// The rounds are skewed (QK of round i+1, softmax of i+1, PV of i) and exchange and P are double-buffered, so one barrier
// of the group's 128 threads a round is enough. Groups of a block share the key tiles and are otherwise independent: one
// feeds the tensor cores while the other waits for its scores.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/verify_attention/config.cuh"
#include "kernels/cuda/verify_attention/plan.cuh"

namespace kdt::cuda {

// Whether the query at row `row` (within the sequence) sees `key`; keys from `context` on are the sequence's own rows.
__device__ inline bool Visible(const VerifyParams& p, const Item& it, int row, int key) {
  if (key >= it.end) return false;
  if (key < it.context) return true;
  int node = key - it.context;
  if (p.causal[it.sequence] != 0) return node <= row;
  const uint64_t* bits = p.ancestor_bits + static_cast<int64_t>(it.row0 + row) * 4;
  return (bits[node >> 6] >> (node & 63)) & 1;
}

// With two owners: where owner w finds piece i. Position d of warp `from` lies at d * 2048 + from * 512 and belongs to
// owner d ^ (from & 1).
__device__ inline uint32_t PieceOfTwo(int w, int i) {
  const int from = i == 0 ? w ^ 1 : i + 1;
  return (w ^ (from & 1)) * 2048 + from * 512;
}

// With four owners: where owner w finds position i + 1 of warp w ^ (i + 1), from its own place w * 512.
__device__ inline int PieceOfFour(int w, int i) { return ((w ^ (i + 1)) - w) * 512; }

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks) VerifyPartial(const __grid_constant__ VerifyParams p) {
  extern __shared__ __align__(1024) uint8_t smem[];
  constexpr int kMTiles = C::kMTiles;
  const int thread = Pinned(threadIdx.x);
  const int lane = thread & 31, warp = thread >> 5;
  const int group = warp >> 2, w = warp & 3;
  const int g = lane >> 2, t = lane & 3;

  // Where this lane reads and writes in shared memory. Chunks of 16 bytes are swizzled by the key's low bits. Each address
  // is pinned to a register: the compiler would rather compute them anew in every round.
  const uint32_t base = Pinned(SharedAddress(smem));
  const uint32_t qk_lane = Pinned(base + ((lane & 7) + ((lane >> 4) << 3)) * 1024 + w * 256 +
                                  ((((lane >> 3) & 1) ^ (lane & 7)) << 4));
  const uint32_t rope_lane = base + C::kRopeAt + ((lane & 7) + ((lane >> 4) << 3)) * 128 +
                             (((2 * w + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
  const uint32_t pv_lane = Pinned(base + ((lane & 7) + (((lane >> 3) & 1) << 3)) * 1024 + w * 256 +
                                  (((lane >> 4) ^ (lane & 7)) << 4));
  const uint32_t piece = Pinned(base + C::kGroupAt + group * C::kGroupBytes + lane * 16 + w * 512);
  const uint32_t exchange = piece - w * 512;
  const int load_key = w * 4 + (lane >> 3), load_chunk = lane & 7;  // eight lanes load a row
  const uint32_t load_lane = base + load_key * 1024 + ((load_chunk ^ (load_key & 7)) << 4);
  const uint32_t load_rope_lane = base + C::kRopeAt + load_key * 128 + ((load_chunk ^ (load_key & 7)) << 4);
  const uint8_t* const load_from = reinterpret_cast<const uint8_t*>(p.pool) + load_chunk * 16;
  const uint32_t full = base + C::kFullAt, empty = base + C::kEmptyAt;

  WaitForPrevious();

  Item& it = *reinterpret_cast<Item*>(smem + C::kItemAt);
  for (int index = blockIdx.x;; index += gridDim.x) {
    __syncthreads();  // the last item and its barriers are done with
    if (warp == 0) {
      const Item found = Planner<C::kTileRows>(p).Find(index, false);
      if (lane == 0) {
        it = found;
        for (int s = 0; s < C::kStages; ++s) {
          if (index != blockIdx.x) {
            BarrierInvalidate(full + 8 * s);
            BarrierInvalidate(empty + 8 * s);
          }
          BarrierInit(full + 8 * s, 128);
          BarrierInit(empty + 8 * s, C::kWarps);
        }
      }
    }
    __syncthreads();
    if (it.sequence < 0) break;
    // What the rounds need rarely is read again from shared memory instead of held in registers, which are all taken.
    const int rounds = (it.end - it.begin + kTileKeys - 1) / kTileKeys;
    const int dense_rounds = max(0, min(it.context, it.end) - it.begin) / kTileKeys;  // rounds that need no mask

    // Loading. The groups take turns; a register holds the slots of the rows this warp loads, for its next eight turns.
    // Keys past the end repeat the last one (their scores are masked, and what they would add must be finite).
    auto slots_of = [&](int turn) {
      const int key = it.begin + ((turn + (lane >> 2)) * C::kGroups + group) * kTileKeys + w * 4 + (lane & 3);
      return p.slot_table[it.sequence * p.table_stride + min(key, it.end - 1)];
    };
    int slots = slots_of(0), slots_next = slots_of(8);
    auto load = [&](int round) {
      if (round % C::kGroups != group) return;
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
      // Not through `base`: the instruction wants a uniform register.
      CopyAsyncArrive(SharedAddress(smem) + C::kFullAt + 8 * (round % C::kStages));
    };
#pragma unroll
    for (int s = 0; s < C::kStages - 1; ++s) {
      if (s < rounds) load(s);
    }

    // Queries: the A operand of every QK of this item. The rows are permuted so that each warp finds the scores of the
    // rows it owns at position 0: position d (of 8 rows) holds the rows of owner d ^ w.
    auto first_flat_row = [&] { return it.tile * C::kTileRows + group * C::kGroupRows; };
    auto flat_row_count = [&] { return it.rows * p.heads; };
    uint32_t q[kMTiles][9][4];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int flat = first_flat_row() + 8 * ((2 * m + half) ^ (w % C::kOwners)) + g;
        const bool valid = flat < flat_row_count();
        if (!valid) flat = 0;
        const uint16_t* src = p.q + (it.row0 + flat / p.heads) * p.q_stride + (flat % p.heads) * kKeyWidth + 2 * t;
#pragma unroll
        for (int k = 0; k < 9; ++k) {
          const int column = k < 8 ? 128 * w + 16 * k : kLatent + 16 * w;
          q[m][k][half] = valid ? *reinterpret_cast<const uint32_t*>(src + column) : 0;
          q[m][k][half + 2] = valid ? *reinterpret_cast<const uint32_t*>(src + column + 8) : 0;
        }
      }
    }
    float o[kMTiles][16][4];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int n = 0; n < 16; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) o[m][n][c] = 0.0f;
    float reference = kNoReference, sum = 0.0f;  // of row 8 w + g, in the lanes of its owner

    auto scores = [&](int next, int parity, float (&own)[4]) {
      float s[kMTiles][2][4];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int c = 0; c < 4; ++c) s[m][n][c] = 0.0f;
      const uint32_t from = qk_lane + next % C::kStages * C::kLatentStage;
      uint32_t b[2][4];
      LoadMatrix4(b[0], from);
      LoadMatrix4(b[1], from ^ 32);
#pragma unroll
      for (int k = 0; k < 9; ++k) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
          MmaBf16(s[m][0], q[m][k], b[k & 1][0], b[k & 1][1]);
          MmaBf16(s[m][1], q[m][k], b[k & 1][2], b[k & 1][3]);
        }
        if (k < 6) LoadMatrix4(b[k & 1], (from ^ (((k + 2) & 3) << 5)) + ((k + 2) >> 2) * 128);
        if (k == 6) LoadMatrix4(b[0], rope_lane + next % C::kRopeStages * C::kRopeStage);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) own[i] = s[0][i >> 1][i & 1];
      // Position d goes where its owner looks for it. With two owners, warps 2 and 3 own nothing and send both positions.
      const uint32_t to = piece + parity * C::kExchange;
#pragma unroll
      for (int d = C::kOwners == 4 ? 1 : 0; d < C::kOwners; ++d) {
        const int m = d >> 1, half = 2 * (d & 1);
        StoreShared4(C::kOwners == 4 ? to + (d - 1) * 2048 : to + d * 2048, s[m][0][half], s[m][0][half + 1],
                     s[m][1][half], s[m][1][half + 1]);
      }
    };

    // Which of this lane's four keys of a round its row sees; all of them in all but the last rounds.
    auto visible = [&](int round) {
      if (round < dense_rounds || w >= C::kOwners) return 15;
      const int flat = first_flat_row() + 8 * w + g;
      const int row = min(flat, flat_row_count() - 1) / p.heads;
      int bits = 0;
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        const int key = it.begin + round * kTileKeys + 2 * t + (i & 1) + 4 * (i & 2);
        bits |= Visible(p, it, row, key) << i;
      }
      return bits;
    };

    // Softmax of a round in the rows' owners, cut into steps that other work is put between: x is the owner's own partial
    // score, the other warps' come through the exchange. No branches: a row's reference and factor are always computed.
    bool moved = false;  // whether this lane's row moved its reference in the latest softmax
    float factor;
    auto piece_of = [&](int parity, int i) {
      return LoadShared4(C::kOwners == 4 ? piece + parity * C::kExchange + i * 2048 + PieceOfFour(w, i)
                                         : exchange + parity * C::kExchange + PieceOfTwo(w & 1, i));
    };
    auto add = [](float (&x)[4], const float4& v) { x[0] += v.x, x[1] += v.y, x[2] += v.z, x[3] += v.w; };
    auto mask_scores = [&](float (&x)[4], int bits) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = (bits >> i & 1) != 0 ? x[i] * p.scale_log2 : -INFINITY;
    };
    auto move_reference = [&](float top) {
      const bool moves = top > reference + kRescaleAbove;
      moved = moves && w < C::kOwners;
      const float next = moves ? top : reference;
      factor = Exp2(reference - next);
      reference = next;
      sum *= factor;
    };
    auto store_probabilities = [&](int parity, const float (&x)[4]) {
      const uint32_t p0 = PackBf16(x[0], x[1]), p1 = PackBf16(x[2], x[3]);
      // The sum is of the rounded values, so that the weights of a row add up to one exactly.
      sum += (LowBf16(p0) + HighBf16(p0)) + (LowBf16(p1) + HighBf16(p1));
      if (w < C::kOwners) {
        const uint32_t to = exchange + C::kProbsAt + parity * C::kProbs + (w >> 1) * 512 + (w & 1) * 4;
        StoreShared(to, __uint_as_float(p0));
        StoreShared(to + 8, __uint_as_float(p1));
        if (t == 0) {
          StoreShared(base + C::kRescaleAt + (group * 2 + parity) * C::kRescale + (8 * w + g) * 4, factor);
        }
      }
    };

    // When a reference moved, the outputs so far are brought to the new one.
    auto rescale_outputs = [&](int parity) {
      const uint32_t from = base + C::kRescaleAt + (group * 2 + parity) * C::kRescale + g * 4;
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
    auto values = [&](int round, int parity, auto&& between) {
      uint32_t a[kMTiles][4];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        const uint4 v = LoadShared4U(exchange + C::kProbsAt + parity * C::kProbs + m * 512);
        a[m][0] = v.x, a[m][1] = v.y, a[m][2] = v.z, a[m][3] = v.w;
      }
      const uint32_t from = pv_lane + round % C::kStages * C::kLatentStage;
      uint32_t b[2][4];
      LoadMatrix4Transposed(b[0], from);
      LoadMatrix4Transposed(b[1], from ^ 32);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
          MmaBf16(o[m][2 * j], a[m], b[j & 1][0], b[j & 1][1]);
          MmaBf16(o[m][2 * j + 1], a[m], b[j & 1][2], b[j & 1][3]);
        }
        if (j < 6) LoadMatrix4Transposed(b[j & 1], (from ^ (((j + 2) & 3) << 5)) + ((j + 2) >> 2) * 128);
        between(j);
      }
    };

    // An empty barrier's first phase says that every warp has read tile 0's scores (whose rope part the first load of
    // the loop replaces), the later ones that every warp is done with the values of the stage's tile.
    {
      float x[4];
      const int bits = visible(0);
      BarrierWait(full, 0);
      scores(0, 0, x);
      __syncwarp();
      if (lane < C::kStages) BarrierArrive(empty + 8 * lane);
      NamedBarrier(1 + group, 128);
      for (int i = 0; i < 3; ++i) add(x, piece_of(0, i));
      mask_scores(x, bits);
      float top = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      move_reference(top);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = Exp2(x[i] - reference);
      store_probabilities(0, x);
    }
    for (int round = 0; round + 1 < rounds; ++round) {
      const int parity = round & 1, next = round + 1;
      float x[4];
      BarrierWait(full + 8 * (next % C::kStages), (next / C::kStages) & 1);
      scores(next, parity ^ 1, x);
      const bool any_moved = NamedBarrierOr(1 + group, 128, moved);
      const int fetch = round + C::kStages - 1;
      if (fetch < rounds && fetch % C::kGroups == group) {
        BarrierWait(empty + 8 * (fetch % C::kStages), (fetch / C::kStages) & 1);
        load(fetch);
      }
      if (any_moved) rescale_outputs(parity);
      const int bits = visible(next);
      float4 sent;
      float top;
      values(round, parity, [&](int j) {
        switch (j) {
          case 0: sent = piece_of(parity ^ 1, 0); break;
          case 1:
            add(x, sent);
            sent = piece_of(parity ^ 1, 1);
            break;
          case 2:
            add(x, sent);
            sent = piece_of(parity ^ 1, 2);
            break;
          case 3:
            add(x, sent);
            mask_scores(x, bits);
            top = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            break;
          case 4: top = fmaxf(top, __shfl_xor_sync(~0u, top, 2)); break;
          case 5:
            move_reference(top);
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = Exp2(x[i] - reference);
            break;
          case 6: store_probabilities(parity ^ 1, x); break;
          default: break;
        }
      });
      __syncwarp();
      if (lane == 0) BarrierArrive(empty + 8 * (round % C::kStages));
    }
    if (NamedBarrierOr(1 + group, 128, moved)) rescale_outputs((rounds - 1) & 1);
    values(rounds - 1, (rounds - 1) & 1, [](int) {});

    LaunchDependents();  // not earlier: the reduce kernel's blocks would take room from this kernel's

    // Row sums, then the result itself (one split) or a partial of it.
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (it.splits == 1) {
      NamedBarrier(1 + group, 128);  // all warps have read the last factors
      if (w < C::kOwners && t == 0) StoreShared(base + C::kRescaleAt + group * 2 * C::kRescale + (8 * w + g) * 4, sum > 0.0f || sum != sum ? 1.0f / sum : 0.0f);
      NamedBarrier(1 + group, 128);
#pragma unroll
      for (int d = 0; d < C::kOwners; ++d) {
        const int flat = first_flat_row() + 8 * d + g;
        if (flat >= flat_row_count()) continue;
        const float inverse = LoadShared(base + C::kRescaleAt + group * 2 * C::kRescale + (8 * d + g) * 4);
        uint16_t* to =
            p.out + (it.row0 + flat / p.heads) * p.out_stride + (flat % p.heads) * kLatent + 128 * w + 2 * t;
#pragma unroll
        for (int n = 0; n < 16; ++n) {
          *reinterpret_cast<uint32_t*>(to + 8 * n) = PackBf16(o[d >> 1][n][2 * (d & 1)] * inverse,
                                                              o[d >> 1][n][2 * (d & 1) + 1] * inverse);
        }
      }
      continue;
    }
    const int64_t item_row = static_cast<int64_t>(index) * C::kTileRows + group * C::kGroupRows;
    if (w < C::kOwners && t == 0) p.partial_ml[item_row + 8 * w + g] = make_float2(reference, sum);
    uint4* to = p.partial + (static_cast<int64_t>(index) * C::kTileRows + (group * 4 + w) * 4 * kMTiles) * 64 + lane;
#pragma unroll
    for (int d = 0; d < C::kOwners; ++d) {
      const int m = d >> 1, half = 2 * (d & 1);
      // float16 with one power of two for these 128 columns of the row: the largest lands in [2^14, 2^15).
      float top = 0.0f;
#pragma unroll
      for (int n = 0; n < 16; ++n) top = fmaxf(top, fmaxf(fabsf(o[m][n][half]), fabsf(o[m][n][half + 1])));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const int exponent = max(15, static_cast<int>(__float_as_uint(top) >> 23));
      const float shrink = __uint_as_float(static_cast<uint32_t>(min(268 - exponent, 254)) << 23);
      if (t == 0) p.partial_scale[(item_row + 8 * d + g) * 4 + w] = 1.0f / shrink;
#pragma unroll
      for (int n4 = 0; n4 < 4; ++n4) {
        uint32_t v[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          v[k] = PackHalf(o[m][4 * n4 + k][half] * shrink, o[m][4 * n4 + k][half + 1] * shrink);
        }
        to[(d * 4 + n4) * 32] = make_uint4(v[0], v[1], v[2], v[3]);
      }
    }
  }
}

}  // namespace kdt::cuda
