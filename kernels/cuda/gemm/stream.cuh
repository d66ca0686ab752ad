// y = x W^T for few rows: W streams through the tensor cores as their A operand.
//
// A block takes 16 kM kOutWarps outputs and up to 8 kTiles rows. Its inputs are cut into pieces of 64 (128
// bytes a row, so that every request is a whole line), of which its kKWarps warps along the inputs take
// turns. A warp keeps its own ring of pieces of W (cp.async, waited for by the warp alone); one warp more
// brings x, a piece for each of kKWarps at a time, through mbarriers. The order of inputs within a product
// does not matter as long as W and x agree: lane (g, t) takes inputs 8 t .. 8 t + 7 of 32 from its row of
// either with one 16-byte load, which serve as two k16 steps.
//
// The order of a sum: pieces p, p + kKWarps, ... of a block's share of the inputs in one accumulator, these
// in order, then the shares (`splits`) in order. kKWarps and splits follow from the shape of W, so a row's
// bits do not depend on the rows beside it; kM, kOutWarps and the rings may be chosen by the number of rows.
//
// As a programmatic dependent a block fills its ring of W before it waits for the kernel in front of it.
#pragma once

#include <type_traits>

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/types.cuh"

namespace kdt::cuda {

// The two k16 steps of 32 inputs, in the order of inputs above, which every form for few rows keeps: `low`
// and `high` are what the lane read of outputs g and g + 8 of a tile of W, `x` what it read of its row of x.
__device__ __forceinline__ void AddFirst(float (&acc)[4], const uint4& low, const uint4& high,
                                         const uint4& x) {
  const uint32_t w[4] = {low.x, high.x, low.y, high.y};
  MmaBf16(acc, w, x.x, x.y);
}
__device__ __forceinline__ void AddSecond(float (&acc)[4], const uint4& low, const uint4& high,
                                          const uint4& x) {
  const uint32_t w[4] = {low.z, high.z, low.w, high.w};
  MmaBf16(acc, w, x.z, x.w);
}

// A matrix and where its products go.
struct StreamPart {
  const bf16* w;
  void* y;
  int64_t w_stride, y_stride;
  int outs;
  bool f32;    // y is float32, else bf16
  bool whole;  // y can be written four outputs at a time
  // W is the gate projection and behind it the up projection, and y is silu(gate) * up, bf16, with half as
  // many columns as W has outputs (a multiple of 16). Outputs are then taken in turns of eight from either.
  bool gated = false;
};

struct StreamParams {
  const bf16* x;
  int64_t x_stride;
  int64_t x_head, w_head, y_head;  // from one head (blockIdx.z) to the next
  int rows, chunks, splits;        // chunks of 8 inputs, a multiple of 4
  int others;                      // blocks in front (in grid.y) that do something else
  bool accumulate;
  StreamPart part[2];  // two matrices may share x; the second one's outs are 0 otherwise
  float* partial;      // [splits][heads][rows][outs of the parts, each padded to 4], with splits
  unsigned* counters;
};

// kKWarps x kOutWarps warps, kM tiles of 16 outputs and kTiles of 8 rows each; a ring of kDepth pieces of W
// for each of them and one of kRounds rounds of x.
template <int kKWarps_, int kOutWarps_, int kM_, int kTiles_, int kDepth_, int kRounds_, bool kGated_ = false>
struct StreamShape {
  static constexpr int kKWarps = kKWarps_, kOutWarps = kOutWarps_, kM = kM_, kTiles = kTiles_;
  static constexpr int kDepth = kDepth_, kRounds = kRounds_;
  static constexpr bool kGated = kGated_;
  static constexpr int kOuts = 16 * kM * kOutWarps, kRows = 8 * kTiles;
  static constexpr int kWarps = kKWarps * kOutWarps;  // that multiply
  static constexpr int kThreads = 32 * (kWarps + 1);
  static constexpr int kSlot = 16 * kM * 128;                    // bytes of a warp's piece of W
  static constexpr int kInput = kRows * 128 * (kGated ? 2 : 1);  // bytes of a piece of x
  static constexpr int kWRing = kWarps * kDepth * kSlot, kXRing = kKWarps * kRounds * kInput;
  // The warps' sums meet in shared memory.
  static constexpr int kPitch = kOuts + 4;
  static constexpr int kSums = kKWarps * kRows * kPitch * 4;
  static constexpr int kShared = kWRing + kXRing > kSums ? kWRing + kXRing : kSums;
  static_assert(kShared <= 101376 - 256);
};

// silu(gate) * up of eight values, the bits of SiluMul.
__device__ __forceinline__ uint32_t GatedPair(uint32_t gate, uint32_t up) {
  const float low = LowBf16(gate), high = HighBf16(gate);
  return PackBf16(Silu(low) * LowBf16(up), Silu(high) * HighBf16(up));
}
__device__ __forceinline__ uint4 GatedChunk(const uint4& gate, const uint4& up) {
  return make_uint4(GatedPair(gate.x, up.x), GatedPair(gate.y, up.y), GatedPair(gate.z, up.z),
                    GatedPair(gate.w, up.w));
}

// An output, to element `at` of y.
__device__ __forceinline__ void StoreOut(const StreamPart& p, bool accumulate, int64_t at, float v) {
  if (p.f32) {
    float* const to = static_cast<float*>(p.y) + at;
    *to = accumulate ? *to + v : v;
  } else {
    bf16* const to = static_cast<bf16*>(p.y) + at;
    *to = FromFloat<bf16>(accumulate ? ToFloat(*to) + v : v);
  }
}

// Four outputs from `out` on, to element `at` of y.
__device__ __forceinline__ void StoreOuts(const StreamPart& p, bool accumulate, int64_t at, int out,
                                          float4 v) {
  if (p.f32) {
    float* to = static_cast<float*>(p.y) + at;
    if (p.whole) {
      if (accumulate) {
        const float4 old = *reinterpret_cast<const float4*>(to);
        v = make_float4(old.x + v.x, old.y + v.y, old.z + v.z, old.w + v.w);
      }
      *reinterpret_cast<float4*>(to) = v;
      return;
    }
    const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (out + i < p.outs) to[i] = accumulate ? to[i] + values[i] : values[i];
    }
    return;
  }
  bf16* to = static_cast<bf16*>(p.y) + at;
  if (p.whole) {
    if (accumulate) {
      const uint2 old = *reinterpret_cast<const uint2*>(to);
      v = make_float4(LowBf16(old.x) + v.x, HighBf16(old.x) + v.y, LowBf16(old.y) + v.z,
                      HighBf16(old.y) + v.w);
    }
    *reinterpret_cast<uint2*>(to) = make_uint2(PackBf16(v.x, v.y), PackBf16(v.z, v.w));
    return;
  }
  const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (out + i < p.outs) to[i] = FromFloat<bf16>(accumulate ? ToFloat(to[i]) + values[i] : values[i]);
  }
}

// Four values of silu(gate) * up, as SiluMul makes them of the two products in bf16.
__device__ __forceinline__ void StoreGated(const StreamPart& p, int64_t at, const float4& gate,
                                           const float4& up) {
  const uint2 v = make_uint2(GatedPair(PackBf16(gate.x, gate.y), PackBf16(up.x, up.y)),
                             GatedPair(PackBf16(gate.z, gate.w), PackBf16(up.z, up.w)));
  *reinterpret_cast<uint2*>(static_cast<bf16*>(p.y) + at) = v;
}

// Counts the blocks that have come here; true in the last of `count`, which sees what the others wrote.
// Leaves the counter zero.
__device__ __forceinline__ bool ComesLast(unsigned* counter, int count) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    // Release of what all threads wrote before the barrier, acquire for what they read behind the next one.
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    last = before == static_cast<unsigned>(count) - 1;
    if (last) *counter = 0;
  }
  __syncthreads();
  return last;
}

inline constexpr int kMaxShares = 8;  // blocks that share the inputs of a tile

// A block's place: a tile of outputs (from output block_out of its part on), rows, and a share of the inputs.
struct TilePlace {
  int tile, split, first_row, rows, block_out;
  bool second;  // of the second part
};

// Rows of y, from sum_of(row, out): the sums of four outputs.
template <typename S, typename SumOf>
__device__ __forceinline__ void StoreTile(const StreamParams& p, const StreamPart& part, const TilePlace& at,
                                          const SumOf& sum_of) {
  if (part.gated) {
    for (int i = threadIdx.x; i < at.rows * (S::kOuts / 8); i += S::kThreads) {
      const int row = i / (S::kOuts / 8), four = i % (S::kOuts / 8), out = four / 2 * 16 + four % 2 * 4;
      if (at.block_out + out >= part.outs) continue;
      StoreGated(part, (at.first_row + row) * part.y_stride + at.block_out / 2 + four * 4, sum_of(row, out),
                 sum_of(row, out + 8));
    }
    return;
  }
  for (int i = threadIdx.x; i < at.rows * (S::kOuts / 4); i += S::kThreads) {
    const int row = i / (S::kOuts / 4), out = i % (S::kOuts / 4) * 4;
    if (at.block_out + out >= part.outs) continue;
    StoreOuts(part, p.accumulate,
              blockIdx.z * p.y_head + (at.first_row + row) * part.y_stride + at.block_out + out,
              at.block_out + out, sum_of(row, out));
  }
}

// The same from sum_of(load(row, out)), kRounds rounds of the block's threads at a time: all their loads are
// on their way before the first one's value is needed.
template <typename S, int kRounds, typename Load, typename SumOf>
__device__ __forceinline__ void StoreLoadedTile(const StreamParams& p, const StreamPart& part,
                                                const TilePlace& at, const Load& load, const SumOf& sum_of) {
  using Loaded = decltype(load(0, 0));
  if (part.gated || kRounds == 1) {  // gate and up are two loads already
    StoreTile<S>(p, part, at, [&](int row, int out) { return sum_of(load(row, out)); });
    return;
  }
  const int count = at.rows * (S::kOuts / 4);
  const auto place = [&](int i, int* row, int* out) {
    *row = i / (S::kOuts / 4), *out = i % (S::kOuts / 4) * 4;
    return i < count && at.block_out + *out < part.outs;
  };
  for (int first = threadIdx.x; first < count; first += kRounds * S::kThreads) {
    Loaded loaded[kRounds];
    int row, out;
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      if (place(first + r * S::kThreads, &row, &out)) loaded[r] = load(row, out);
    }
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      if (place(first + r * S::kThreads, &row, &out))
        StoreOuts(part, p.accumulate,
                  blockIdx.z * p.y_head + (at.first_row + row) * part.y_stride + at.block_out + out,
                  at.block_out + out, sum_of(loaded[r]));
    }
  }
}

// Where the shares of a tile's sums are: those of one share, and the way from a share to the next.
__device__ __forceinline__ float* TileShares(const StreamParams& p, const TilePlace& at, int row, int out,
                                             int64_t* share) {
  const int first = (p.part[0].outs + 3) & ~3, padded_outs = first + ((p.part[1].outs + 3) & ~3);
  *share = static_cast<int64_t>(gridDim.z) * p.rows * padded_outs;
  return p.partial + (static_cast<int64_t>(blockIdx.z) * p.rows + at.first_row + row) * padded_outs +
         at.block_out + (at.second ? first : 0) + out;
}

// A warp's sums of kTiles row tiles from `from` on to shared memory, where the warps along the inputs meet.
template <typename S, int kTiles, int kM, int kAllTiles>
__device__ __forceinline__ void PutSums(float* sums, const float (&acc)[kM][kAllTiles][4], int from,
                                        int k_warp, int first_out, int g, int t) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int row = 8 * n + 2 * t + (c & 1), out = first_out + 16 * m + 8 * (c >> 1) + g;
        sums[(k_warp * 8 * kTiles + row) * S::kPitch + out] = acc[m][from + n][c];
      }
    }
  }
}

// The sums of the warps along the inputs, [kKWarps][kRows][kPitch] in shared memory, become rows of y, or of
// this block's share where several have shares of the inputs.
template <typename S, int kRows = S::kRows>
__device__ __forceinline__ void StoreSums(const StreamParams& p, const StreamPart& part, const TilePlace& at,
                                          const float* sums) {
  const auto of_warps = [&](int row, int out) {
    float4 sum = *reinterpret_cast<const float4*>(sums + row * S::kPitch + out);
#pragma unroll
    for (int k = 1; k < S::kKWarps; ++k) {
      const float4 v = *reinterpret_cast<const float4*>(sums + (k * kRows + row) * S::kPitch + out);
      sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
    }
    return sum;
  };
  if (p.splits == 1) {
    StoreTile<S>(p, part, at, of_warps);
    return;
  }
  for (int i = threadIdx.x; i < at.rows * (S::kOuts / 4); i += S::kThreads) {
    const int row = i / (S::kOuts / 4), out = i % (S::kOuts / 4) * 4;
    if (at.block_out + out >= part.outs) continue;
    int64_t share;
    float* const to = TileShares(p, at, row, out, &share);
    __stcg(reinterpret_cast<float4*>(to + at.split * share), of_warps(row, out));
  }
}

// The block that comes last adds the shares up, in order.
template <typename S>
__device__ __forceinline__ void AddShares(const StreamParams& p, const StreamPart& part,
                                          const TilePlace& at) {
  if (p.splits == 1) return;
  const int tiles = (gridDim.y - p.others) / p.splits;
  if (!ComesLast(p.counters + (blockIdx.z * gridDim.x + blockIdx.x) * tiles + at.tile, p.splits)) return;
  const auto add = [&]<int kShares>(std::integral_constant<int, kShares>) {
    struct Shares {
      float4 v[kShares];
    };
    // As many rounds as there are, up to 64 registers.
    constexpr int kAll = (S::kRows * (S::kOuts / 4) + S::kThreads - 1) / S::kThreads;
    StoreLoadedTile<S, (kAll < 16 / kShares ? kAll : 16 / kShares)>(
        p, part, at,
        [&](int row, int out) {
          int64_t share;
          const float* const from = TileShares(p, at, row, out, &share);
          Shares shares;  // those past the last one for nothing
#pragma unroll
          for (int s = 0; s < kShares; ++s)
            shares.v[s] = __ldcg(reinterpret_cast<const float4*>(from + (s < p.splits ? s : 0) * share));
          return shares;
        },
        [&](const Shares& shares) {
          float4 sum = shares.v[0];
#pragma unroll
          for (int s = 1; s < kShares; ++s) {
            const float4& v = shares.v[s];
            if (s < p.splits) sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
          }
          return sum;
        });
  };
  if (p.splits <= 4) {
    add(std::integral_constant<int, 4>{});
  } else {
    add(std::integral_constant<int, kMaxShares>{});
  }
}

template <typename S>
__device__ __forceinline__ void FinishTile(const StreamParams& p, const StreamPart& part, const TilePlace& at,
                                           const float* sums) {
  StoreSums<S>(p, part, at, sums);
  AddShares<S>(p, part, at);
}

// What the blocks in front do (StreamParams.others).
struct NoOthers {};

// Does it where this block is one of them; else `place` is the block's among those behind them (in grid.y).
template <typename Others>
__device__ __forceinline__ bool DoneForOthers(const StreamParams& p, const Others& others, void* shared,
                                              int& place) {
  place = blockIdx.y;
  if constexpr (!std::is_same_v<Others, NoOthers>) {
    if (place < p.others) {
      others(place * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x), shared);
      return true;
    }
    place -= p.others;
  }
  return false;
}

template <typename S, typename Others>
__global__ void __launch_bounds__(S::kThreads, 2)
    StreamKernel(const __grid_constant__ StreamParams p, const __grid_constant__ Others others) {
  constexpr int kKWarps = S::kKWarps, kM = S::kM, kTiles = S::kTiles, kDepth = S::kDepth,
                kRounds = S::kRounds;
  constexpr int kHalves = S::kGated ? 2 : 1;  // gate and up
  extern __shared__ uint4 shared[];
  __shared__ uint64_t barriers[2 * kRounds];  // of x: full, empty
  LaunchDependents();
  int place;
  if (DoneForOthers(p, others, shared, place)) return;
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int g = lane >> 2, t = lane & 3;
  const int k_warp = warp % kKWarps, out_warp = warp / kKWarps;
  const int tile = place / p.splits, split = place - tile * p.splits;
  const int first_tiles = (p.part[0].outs + S::kOuts - 1) / S::kOuts;
  const StreamPart& part = p.part[tile >= first_tiles];
  const int head = blockIdx.z, first_row = blockIdx.x * S::kRows;
  const int rows_here = min(p.rows - first_row, S::kRows);
  const int block_out = (tile - (tile >= first_tiles ? first_tiles : 0)) * S::kOuts;
  const int pieces = (p.chunks + 7) / 8;
  const int begin = static_cast<int>(static_cast<int64_t>(pieces) * split / p.splits);
  const int end = static_cast<int>(static_cast<int64_t>(pieces) * (split + 1) / p.splits);

  // In a copy eight lanes take a row's 128 bytes. Chunks of odd rows are swapped by fours, so that eight
  // lanes reading half of two rows meet in no bank.
  const int line = lane >> 3, chunk = lane & 7;
  const uint32_t at_line = line * 128 + (chunk ^ 4 * (line & 1)) * 16;
  const uint32_t w_ring = SharedAddress(shared) + warp * kDepth * S::kSlot;
  const uint32_t x_ring = SharedAddress(shared) + S::kWRing;
  const uint32_t full = SharedAddress(barriers), empty = full + 8 * kRounds;
  if (threadIdx.x < kRounds) {
    BarrierInit(full + 8 * threadIdx.x, 32);
    BarrierInit(empty + 8 * threadIdx.x, S::kWarps * 32);
  }

  // Outputs past the end repeat the last one; what they give is not stored. Of a last piece of 32 inputs the
  // other half is any weights, and zeros of x.
  const int first_out = out_warp * 16 * kM;
  const int first_w = part.gated ? block_out / 2 : block_out;
  const bf16* const w = part.w + head * p.w_head + first_w * part.w_stride;
  int line_at[4 * kM];  // of the lines of W that this lane copies, from `w` on
#pragma unroll
  for (int i = 0; i < 4 * kM; ++i) {
    const int row = part.gated
                        ? min(first_out / 2 + i / 4 * 8 + i % 2 * 4 + line, part.outs / 2 - 1 - first_w) +
                              i / 2 % 2 * (part.outs / 2)
                        : min(first_out + 4 * i + line, part.outs - 1 - first_w);
    line_at[i] = row * static_cast<int>(part.w_stride);
  }
  auto fetch = [&](int piece, int slot) {
    const bf16* from = w + min(piece * 8 + chunk, p.chunks - 1) * 8;
#pragma unroll
    for (int i = 0; i < 4 * kM; ++i)
      CopyAsync16(w_ring + slot * S::kSlot + i * 512 + at_line, from + line_at[i]);
  };
  if (warp < S::kWarps) {
#pragma unroll
    for (int d = 0; d < kDepth - 1; ++d) {
      const int piece = begin + k_warp + d * kKWarps;
      if (piece < end) fetch(piece, d);
      CopyAsyncCommit();
    }
  }
  __syncthreads();
  WaitForPrevious();

  float acc[kM][kTiles][4] = {};
  if (warp == S::kWarps) {
    // This warp brings x, a round (a piece for each of the warps along the inputs) at a time.
    const bf16* const x = p.x + head * p.x_head + first_row * p.x_stride;
    for (int round = 0, slot = 0, turn = 1; begin + round * kKWarps < end; ++round) {
      if (round >= kRounds) BarrierWait(empty + 8 * slot, turn);
#pragma unroll
      for (int q = 0; q < kKWarps; ++q) {
        const int piece = begin + round * kKWarps + q;
        if (piece >= end) break;
        const bool there = piece * 8 + chunk < p.chunks;
        const bf16* from = x + (there ? piece * 8 + chunk : 0) * 8;
        const uint32_t to = x_ring + (slot * kKWarps + q) * S::kInput + at_line;
#pragma unroll
        for (int i = 0; i < 2 * kTiles; ++i) {
          if (4 * i + line >= rows_here) break;
#pragma unroll
          for (int h = 0; h < kHalves; ++h)
            CopyAsync16Or0(to + h * S::kRows * 128 + i * 512,
                           from + (4 * i + line) * static_cast<int>(p.x_stride) + h * p.chunks * 8, there);
        }
      }
      CopyAsyncArrive(full + 8 * slot);
      if (++slot == kRounds) slot = 0, turn ^= 1;
    }
  } else {
    const uint32_t at_lane = g * 128 + t * 16;
    const uint32_t swap = 64 * (g & 1);
    int slot = 0, filled = kDepth - 1, x_slot = 0, turn = 0;
#pragma unroll 1
    for (int piece = begin + k_warp; piece < end; piece += kKWarps) {
      CopyAsyncWaitGroups<kDepth - 2>();
      __syncwarp();
      const int next = piece + (kDepth - 1) * kKWarps;
      if (next < end) fetch(next, filled);
      CopyAsyncCommit();
      BarrierWait(full + 8 * x_slot, turn);
      const uint32_t from_w = w_ring + slot * S::kSlot + at_lane;
      const uint32_t from_x = x_ring + (x_slot * kKWarps + k_warp) * S::kInput + at_lane;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t side = (64 * half) ^ swap;
        uint4 a[2 * kM];
#pragma unroll
        for (int i = 0; i < 2 * kM; ++i) a[i] = LoadShared4U(from_w + i * 1024 + side);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          uint4 b = LoadShared4U(from_x + n * 1024 + side);
          if constexpr (S::kGated) b = GatedChunk(b, LoadShared4U(from_x + S::kRows * 128 + n * 1024 + side));
#pragma unroll
          for (int m = 0; m < kM; ++m) {
            AddFirst(acc[m][n], a[2 * m], a[2 * m + 1], b);
            AddSecond(acc[m][n], a[2 * m], a[2 * m + 1], b);
          }
        }
      }
      BarrierArrive(empty + 8 * x_slot);
      if (++x_slot == kRounds) x_slot = 0, turn ^= 1;
      filled = slot;
      slot = slot + 1 == kDepth ? 0 : slot + 1;
    }
  }

  // Sums of the warps along the inputs, in order.
  float* const sums = reinterpret_cast<float*>(shared);
  __syncthreads();
  if (warp < S::kWarps) PutSums<S, kTiles>(sums, acc, 0, k_warp, first_out, g, t);
  __syncthreads();
  FinishTile<S>(p, part, {tile, split, first_row, rows_here, block_out, tile >= first_tiles}, sums);
}

}  // namespace kdt::cuda
