// y = x W^T for 33 to 64 rows in tiles of 64 outputs and all rows, a block a multiprocessor: both W and x go
// from L2 to the multiprocessors half as often as in tiles of 64 x 32.
//
// The sums are those of gemm/stream.cuh bit for bit: four groups of two warps, each taking every fourth piece
// of 64 inputs; a warp has 32 of the outputs and all rows. A step is a whole piece, so that every request is
// a line of 128 bytes: what a multiprocessor has under way is limited in requests. W of a step is in
// registers when the step begins and its place asked for anew, the first step's goes there directly, before
// the wait for the kernel in front. Copies go through L1, as in gemm/broad.cuh; registers keep a second block
// away, for which L1 would be too small.
#pragma once

#include "kernels/cuda/gemm/broad.cuh"

namespace kdt::cuda {

struct SquareShape {
  static constexpr int kKWarps = 4, kOutWarps = 2, kM = 2, kTiles = 8;
  static constexpr int kOuts = 16 * kM * kOutWarps, kRows = 8 * kTiles;
  static constexpr int kGroup = 32 * kOutWarps, kThreads = kKWarps * kGroup;
  static constexpr int kW = 16 * kM * 128, kX = kRows * 128;  // bytes of a step: a warp's W, a group's x
  static constexpr int kWRing = kKWarps * kOutWarps * kW, kRing = kWRing + kKWarps * 2 * kX;
  static constexpr int kPitch = kOuts + 4, kSums = kKWarps * kRows * kPitch * 4;
  static constexpr int kShared = kRing > kSums ? kRing : kSums;
  static_assert(kShared <= 101376 - 64);
};

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1) SquareKernel(const __grid_constant__ StreamParams p) {
  constexpr int kM = S::kM, kTiles = S::kTiles;
  extern __shared__ uint4 shared[];
  LaunchDependents();
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int g = lane >> 2, t = lane & 3, line = lane >> 3, chunk = lane & 7;
  const int k_warp = warp % S::kKWarps, out_warp = warp / S::kKWarps, first_out = out_warp * 16 * kM;
  const int tile = blockIdx.y / p.splits, split = blockIdx.y - tile * p.splits;
  const StreamPart& part = p.part[0];
  const int block_out = tile * S::kOuts, head = blockIdx.z;
  // The group's pieces of 64 inputs are first, first + 4, ...
  const int pieces = (p.chunks + 7) / 8;
  const int first = pieces * split / p.splits + k_warp, end = pieces * (split + 1) / p.splits;
  const int steps = end > first ? (end - first + 3) / 4 : 0;

  // In a copy eight lanes take a row's 128 bytes, chunks of odd rows swapped by fours (stream.cuh).
  const uint32_t at_line = line * 128 + (chunk ^ 4 * (line & 1)) * 16;
  const uint32_t w_ring = SharedAddress(shared) + warp * S::kW;
  const uint32_t x_ring = SharedAddress(shared) + S::kWRing + k_warp * 2 * S::kX;
  // Outputs past the end repeat the last one; what they give is not stored. Offsets in bytes have 32 bits,
  // and rows are worked out at every use (broad.cuh).
  const char* const w = reinterpret_cast<const char*>(part.w + head * p.w_head);
  const uint32_t w_stride = static_cast<uint32_t>(part.w_stride * 2);
  const int this_w = block_out + first_out, line_w = this_w + line, last_w = part.outs - 1;
  const uint32_t to_w = w_ring + at_line;
  const auto fetch_w = [&](int step) {
    const uint32_t at = static_cast<uint32_t>(min((first + 4 * step) * 8 + chunk, p.chunks - 1)) * 16;
    const int from = static_cast<int>(Pinned(line_w));
#pragma unroll
    for (int r = 0; r < 16 * kM; r += 4)
      CopyAsync16Cached(to_w + r * 128, w + (static_cast<uint32_t>(min(from + r, last_w)) * w_stride + at));
  };
  const char* const x = reinterpret_cast<const char*>(p.x + head * p.x_head);
  const uint32_t x_stride = static_cast<uint32_t>(p.x_stride) * 2;
  const int rows = p.rows, line_x = 4 * out_warp + line;
  const uint32_t to_x = x_ring + 4 * out_warp * 128 + at_line;
  const auto fetch_x = [&](int step, int slot) {
    const int from = (first + 4 * step) * 8 + chunk, row = static_cast<int>(Pinned(line_x));
    const bool there = from < p.chunks;
    const uint32_t to = to_x + slot * S::kX;
#pragma unroll
    for (int r = 0; r < S::kRows; r += 4 * S::kOutWarps) {
      if (r + row < rows)
        CopyAsync16CachedOr0(to + r * 128, x + ((r + row) * x_stride + (there ? from * 16 : 0)), there);
    }
  };
  uint4 a[2][2 * kM];  // of a step's two halves
  if (steps > 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t at = static_cast<uint32_t>(min(first * 8 + 4 * half + t, p.chunks - 1)) * 16;
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i)
        a[half][i] =
            LoadStreamed(w + (static_cast<uint32_t>(min(this_w + 8 * i + g, last_w)) * w_stride + at));
    }
  }
  if (steps > 1) fetch_w(1);
  WaitForPrevious();
  if (steps > 0) fetch_x(0, 0);
  CopyAsyncCommit();
  CopyAsyncCommit();  // as if by the steps in front of the first

  float acc[kM][kTiles][4] = {};
  const uint32_t from_lane = g * 128 + t * 16, swap = 64 * (g & 1);
  int slot = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    CopyAsyncWaitGroups<1>();
    NamedBarrier(1 + k_warp, S::kGroup);
    if (step + 1 < steps) fetch_x(step + 1, slot ^ 1);
    CopyAsyncCommit();
#pragma unroll
    for (int half = 0; half < 2; ++half)
      BroadProducts<kM, kTiles, 1024>(acc, a[half], x_ring + from_lane + slot * S::kX + ((64 * half) ^ swap));
    slot ^= 1;
    if (step + 1 < steps) {
      CopyAsyncWaitGroups<1>();
      __syncwarp();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 2 * kM; ++i)
          a[half][i] = LoadShared4U(w_ring + from_lane + i * 1024 + ((64 * half) ^ swap));
      }
      __syncwarp();
      if (step + 2 < steps) fetch_w(step + 2);
    }
    CopyAsyncCommit();
  }

  // As many named barriers in all warps (broad.cuh).
  const int most = (end - first + k_warp + 3) / 4;
#pragma unroll 1
  for (int step = steps; step < most; ++step) NamedBarrier(1 + k_warp, S::kGroup);
  float* const sums = reinterpret_cast<float*>(shared);
  __syncthreads();
  PutSums<S, kTiles>(sums, acc, 0, k_warp, first_out, g, t);
  __syncthreads();
  FinishTile<S>(p, part, {tile, split, 0, p.rows, block_out, false}, sums);
}

}  // namespace kdt::cuda
