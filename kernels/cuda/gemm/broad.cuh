// y = x W^T for up to 64 rows in tiles of many outputs and all rows, so that neither W nor x goes from L2 to
// the multiprocessors more often than it must. gemm.cu (IsBroad) says for which matrices and rows.
//
// The sums are those of gemm/stream.cuh bit for bit: four groups of warps, each taking every fourth piece of
// 64 inputs, a step of half a piece or a piece at a time; a warp of a group has 16 kM of the outputs and all
// rows. A warp brings its own W and the group together brings its x, some steps ahead; a group waits for no
// other. Copies go through L1 (cp.async.ca): past it the same copies take up to a half longer, also where
// nothing is read twice. What is under way has to fit L1: with 60 KB or less of it (shared memory of 196 KB
// and more) everything here takes a quarter to two fifths longer.
#pragma once

#include "kernels/cuda/gemm/stream.cuh"

namespace kdt::cuda {

// kOutWarps warps of 16 kM outputs in each group, 8 kTiles rows, steps of kInputs inputs, kDepth of them
// ahead; kBlocks blocks a multiprocessor where there is the room. Without kUnits a warp's W of a step goes to
// registers in one go and then its place is asked for anew. With kUnits that is done 16 outputs at a time, a
// warp's ring has kUnits of these units, and it is x of the step that is in registers from the start.
template <int kOutWarps_, int kM_, int kTiles_, int kDepth_, int kInputs_, int kBlocks_, int kUnits_ = 0>
struct BroadShape {
  static constexpr int kOutWarps = kOutWarps_, kM = kM_, kTiles = kTiles_, kDepth = kDepth_;
  static constexpr int kInputs = kInputs_, kBlocks = kBlocks_, kUnits = kUnits_;
  static constexpr int kKWarps = 4, kOuts = 16 * kM * kOutWarps, kRows = 8 * kTiles;
  static constexpr int kGroup = 32 * kOutWarps, kThreads = kKWarps * kGroup;
  static constexpr int kLine = 2 * kInputs;                     // bytes of a row in a step
  static constexpr int kUnit = 16 * kLine, kSlot = kM * kUnit;  // of a warp's W
  static constexpr int kXSlots = kDepth + 1, kXSlot = kRows * kLine;
  static constexpr int kWarpRing = kUnits > 0 ? kUnits* kUnit : kDepth* kSlot;
  static constexpr int kWRing = kKWarps * kOutWarps * kWarpRing;
  static constexpr int kRing = kWRing + kKWarps * kXSlots * kXSlot;
  // The sums meet in the rings' place, some rows at a time.
  static constexpr int kPitch = kOuts + 4, kMost = 101376 - 64;
  static constexpr int SumTiles() {
    int tiles = kTiles;
    while (kKWarps * 8 * tiles * kPitch * 4 > kMost) tiles /= 2;
    return tiles;
  }
  static constexpr int kSumTiles = SumTiles(), kSumRows = 8 * kSumTiles;
  static constexpr int kSums = kKWarps * kSumRows * kPitch * 4;
  static constexpr int kShared = kRing > kSums ? kRing : kSums;
  static_assert(kShared <= kMost && kTiles % kSumTiles == 0 && kTiles % 2 == 0 &&
                (kInputs == 32 || kInputs == 64) && (kUnits == 0 || kUnits >= kM));
  // How many steps start from the unit behind the one whose place unit m takes, up to unit m itself.
  static constexpr int StartsUpTo(int m) {
    int starts = 0;
    for (int unit = m - kUnits + 1; unit <= m; ++unit) starts += unit % kM == 0;
    return starts;
  }
};
// Copies that may be under way when unit m of a step is needed (those of units and x behind its own), and
// when x of a step is.
template <typename S, int m>
inline constexpr int kBehindUnit = S::kUnits - 1 + S::StartsUpTo(m);
template <typename S>
inline constexpr int kBehindX = S::kDepth* S::kM + S::kDepth - 1;

// acc += the products of 32 inputs: tiles of rows two at a time, the next two on their way. No product
// follows the one it adds to.
template <int kM, int kTiles, int kStep>
__device__ __forceinline__ void BroadProducts(float (&acc)[kM][kTiles][4], const uint4 (&a)[2 * kM],
                                              uint32_t from_x) {
  uint4 b[2][2];
  b[0][0] = LoadShared4U(from_x);
  b[0][1] = LoadShared4U(from_x + kStep);
#pragma unroll
  for (int n = 0; n < kTiles; n += 2) {
    const int at = n / 2 % 2;
    if (n + 2 < kTiles) {
      b[at ^ 1][0] = LoadShared4U(from_x + (n + 2) * kStep);
      b[at ^ 1][1] = LoadShared4U(from_x + (n + 3) * kStep);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        AddFirst(acc[m][n + j], a[2 * m], a[2 * m + 1], b[at][j]);
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        AddSecond(acc[m][n + j], a[2 * m], a[2 * m + 1], b[at][j]);
      }
    }
  }
}

// f(0), f(1), ... f(kCount - 1), each with its number as a type.
template <int kCount, int kFrom = 0, typename F>
__device__ __forceinline__ void ForEach(const F& f) {
  if constexpr (kFrom < kCount) {
    f(std::integral_constant<int, kFrom>{});
    ForEach<kCount, kFrom + 1>(f);
  }
}

template <typename S, typename Others>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    BroadKernel(const __grid_constant__ StreamParams p, const __grid_constant__ Others others) {
  constexpr int kM = S::kM, kTiles = S::kTiles, kDepth = S::kDepth, kLine = S::kLine;
  constexpr int kHalves = S::kInputs / 32, kChunks = kLine / 16, kLines = 32 / kChunks;
  extern __shared__ uint4 shared[];
  LaunchDependents();
  int place;
  if (DoneForOthers(p, others, shared, place)) return;
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int g = lane >> 2, t = lane & 3;
  const int k_warp = warp % S::kKWarps, out_warp = warp / S::kKWarps, first_out = out_warp * 16 * kM;
  const int tile = place / p.splits, split = place - tile * p.splits;
  const int first_tiles = (p.part[0].outs + S::kOuts - 1) / S::kOuts;
  const StreamPart& part = p.part[tile >= first_tiles];
  const int block_out = (tile - (tile >= first_tiles ? first_tiles : 0)) * S::kOuts;
  const int head = blockIdx.z, first_row = blockIdx.x * S::kRows;
  const int rows_here = min(p.rows - first_row, S::kRows);
  // The group's pieces of 64 inputs are first, first + 4, ...
  const int pieces = (p.chunks + 7) / 8;
  const int first = pieces * split / p.splits + k_warp, end = pieces * (split + 1) / p.splits;
  const int steps = (end > first ? (end - first + 3) / 4 : 0) * (2 / kHalves);

  // In a copy kChunks lanes take a row's bytes. Where these are 128, chunks of odd rows are swapped by fours,
  // as in stream.cuh.
  const int line = lane / kChunks, chunk = lane % kChunks;
  const uint32_t at_line = line * kLine + (kHalves == 2 ? chunk ^ 4 * (line & 1) : chunk) * 16;
  const uint32_t w_ring = SharedAddress(shared) + warp * S::kWarpRing;
  const uint32_t x_ring = SharedAddress(shared) + S::kWRing + k_warp * S::kXSlots * S::kXSlot;
  const auto chunk_of = [&](int step) {
    return kHalves == 2 ? (first + 4 * step) * 8 + chunk
                        : (first + 4 * (step >> 1)) * 8 + (step & 1) * 4 + chunk;
  };
  // Outputs past the end repeat the last one; what they give is not stored. Registers are short: rows of W
  // are worked out at every use, and offsets in bytes have 32 bits.
  const char* const w = reinterpret_cast<const char*>(part.w + head * p.w_head);
  const uint32_t w_stride = static_cast<uint32_t>(part.w_stride * 2);
  const int line_w = (part.gated ? (block_out + first_out) / 2 : block_out + first_out) + line;
  const int last_w = (part.gated ? part.outs / 2 : part.outs) - 1;
  const int by16 = part.gated ? 8 : 16, by8 = part.gated ? 0 : 8, up = part.gated ? part.outs / 2 : 0;
  const auto fetch_w = [&](int step, int unit, int units, uint32_t to) {
    const uint32_t at = static_cast<uint32_t>(min(chunk_of(step), p.chunks - 1)) * 16;
    const int from = static_cast<int>(Pinned(line_w));
#pragma unroll
    for (int r = 16 * unit; r < 16 * (unit + units); r += kLines) {
      const int row = min(from + r / 16 * by16 + r / 8 % 2 * by8 + r % 8, last_w) + r / 8 % 2 * up;
      CopyAsync16Cached(to + at_line + (r - 16 * unit) * kLine,
                        w + (static_cast<uint32_t>(row) * w_stride + at));
    }
  };
  const char* const x = reinterpret_cast<const char*>(p.x + head * p.x_head + first_row * p.x_stride);
  const uint32_t x_stride = static_cast<uint32_t>(p.x_stride) * 2;
  const auto fetch_x = [&](int step, int slot) {
    const int from = chunk_of(step);
    const bool there = from < p.chunks;
    const uint32_t to = x_ring + slot * S::kXSlot + at_line;
#pragma unroll
    for (int r = 0; r < S::kRows; r += kLines * S::kOutWarps) {
      const int row = r + out_warp * kLines;
      if (row + line < rows_here)
        CopyAsync16CachedOr0(to + row * kLine, x + ((row + line) * x_stride + (there ? from * 16 : 0)),
                             there);
    }
  };
  if constexpr (S::kUnits > 0) {
#pragma unroll
    for (int u = 0; u < S::kUnits; ++u) {
      if (u / kM < steps) fetch_w(u / kM, u % kM, 1, w_ring + u * S::kUnit);
    }
  } else {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      if (d < steps) fetch_w(d, 0, kM, w_ring + d * S::kSlot);
    }
  }
  WaitForPrevious();
#pragma unroll
  for (int d = 0; d < kDepth; ++d) {
    if (d < steps) fetch_x(d, d);
      // As if by the steps in front of the first.
#pragma unroll
    for (int copies = 0; copies < (S::kUnits > 0 ? 1 + kM : 1); ++copies) CopyAsyncCommit();
  }

  float acc[kM][kTiles][4] = {};
  const uint32_t from_lane = g * kLine + t * 16, swap = kHalves == 2 ? 64 * (g & 1) : 0;
  int slot = 0, x_slot = 0, x_free = kDepth;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    CopyAsyncWaitGroups<(S::kUnits > 0 ? kBehindX<S> : kDepth - 1)>();
    if constexpr (S::kOutWarps == 1) {
      __syncwarp();
    } else {
      NamedBarrier(1 + k_warp, S::kGroup);
    }
    const bool more = step + kDepth < steps;
    if (more) fetch_x(step + kDepth, x_free);
    const uint32_t from_x = x_ring + from_lane + x_slot * S::kXSlot;
    if constexpr (S::kUnits > 0) {
      CopyAsyncCommit();
      uint4 b[kHalves][kTiles];
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
          b[half][n] = LoadShared4U(from_x + n * 8 * kLine + ((64 * half) ^ swap));
      }
      ForEach<kM>([&]<int m>(std::integral_constant<int, m>) {
        CopyAsyncWaitGroups<kBehindUnit<S, m>>();
        __syncwarp();
        const uint32_t unit = w_ring + slot * S::kUnit;
        uint4 low[kHalves], high[kHalves];
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          const uint32_t at = unit + from_lane + ((64 * half) ^ swap);
          low[half] = LoadShared4U(at), high[half] = LoadShared4U(at + 8 * kLine);
        }
        __syncwarp();
        constexpr int kSteps = (m + S::kUnits) / kM, kOf = (m + S::kUnits) % kM;
        if (step + kSteps < steps) fetch_w(step + kSteps, kOf, 1, unit);
        CopyAsyncCommit();
        if (++slot == S::kUnits) slot = 0;
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
#pragma unroll
          for (int n = 0; n < kTiles; ++n) AddFirst(acc[m][n], low[half], high[half], b[half][n]);
#pragma unroll
          for (int n = 0; n < kTiles; ++n) AddSecond(acc[m][n], low[half], high[half], b[half][n]);
        }
      });
    } else {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const uint32_t side = (64 * half) ^ swap;
        uint4 a[2 * kM];
#pragma unroll
        for (int i = 0; i < 2 * kM; ++i)
          a[i] = LoadShared4U(w_ring + from_lane + slot * S::kSlot + i * 8 * kLine + side);
        if (half == kHalves - 1) {  // what the warp has of W is in registers
          __syncwarp();
          if (more) fetch_w(step + kDepth, 0, kM, w_ring + slot * S::kSlot);
          CopyAsyncCommit();
        }
        BroadProducts<kM, kTiles, 8 * kLine>(acc, a, from_x + side);
      }
      if (++slot == kDepth) slot = 0;
    }
    x_free = x_slot;
    if (++x_slot == S::kXSlots) x_slot = 0;
  }

  // As many named barriers in all warps: racecheck does not take a barrier of the block for one between warps
  // that have been at unlike numbers of them.
  if constexpr (S::kOutWarps > 1) {
    const int most = (end - first + k_warp + 3) / 4 * (2 / kHalves);  // the steps of the first group
#pragma unroll 1
    for (int step = steps; step < most; ++step) NamedBarrier(1 + k_warp, S::kGroup);
  }
  float* const sums = reinterpret_cast<float*>(shared);
  TilePlace at{tile, split, first_row, 0, block_out, tile >= first_tiles};
#pragma unroll
  for (int n0 = 0; n0 < kTiles; n0 += S::kSumTiles) {
    at.first_row = first_row + 8 * n0, at.rows = min(rows_here - 8 * n0, S::kSumRows);
    if (at.rows <= 0) break;
    __syncthreads();
    PutSums<S, S::kSumTiles>(sums, acc, n0, k_warp, first_out, g, t);
    __syncthreads();
    StoreSums<S, S::kSumRows>(p, part, at, sums);
  }
  at.first_row = first_row, at.rows = rows_here;
  AddShares<S>(p, part, at);
}

}  // namespace kdt::cuda
