// y = x W^T for 9 to 64 rows in tiles of 64 outputs, a block a multiprocessor, so that x goes from L2 to the
// multiprocessors only once for 64 outputs. gemm.cu (IsWide) says for which matrices.
//
// Sixteen warps: four along the inputs, each 16 of the 64 outputs. The sums are those of gemm/stream.cuh bit
// for bit. W goes straight into registers (a lane reads what it multiplies), kAhead pieces before the block
// waits and then each when its registers are free; what is not on its way by then is asked for into L2. So
// shared memory has x alone, which the four warps at the same inputs bring together and share.
#pragma once

#include "kernels/cuda/gemm/stream.cuh"

namespace kdt::cuda {

// 8 kTiles rows; a ring of kRounds rounds of x, a piece for each of the warps along the inputs.
template <int kTiles_, int kRounds_, int kAhead_>
struct WideShape {
  static constexpr int kTiles = kTiles_, kRounds = kRounds_, kAhead = kAhead_;
  static constexpr int kKWarps = 4, kOutWarps = 4, kOuts = 16 * kOutWarps, kRows = 8 * kTiles;
  static constexpr int kThreads = 32 * kKWarps * kOutWarps, kGroup = 32 * kOutWarps;
  static constexpr int kPiece = kRows * 128;  // bytes of x
  static constexpr int kRing = kKWarps * kRounds * kPiece;
  static constexpr int kPitch = kOuts + 4;
  static constexpr int kSums = kKWarps * kRows * kPitch * 4;
  static constexpr int kShared = kRing > kSums ? kRing : kSums;
  static_assert(kShared <= 101376 - 64 && kPiece / 16 % kGroup == 0 && kGroup == 128 && kRounds >= 2);
};

template <typename S, typename Others>
__global__ void __launch_bounds__(S::kThreads, 1)
    WideKernel(const __grid_constant__ StreamParams p, const __grid_constant__ Others others) {
  constexpr int kTiles = S::kTiles, kRounds = S::kRounds, kAhead = S::kAhead;
  extern __shared__ uint4 shared[];
  LaunchDependents();
  int place;
  if (DoneForOthers(p, others, shared, place)) return;
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int g = lane >> 2, t = lane & 3;
  const int k_warp = warp / S::kOutWarps, first_out = warp % S::kOutWarps * 16;
  const int tile = place / p.splits, split = place - tile * p.splits;
  const int first_tiles = (p.part[0].outs + S::kOuts - 1) / S::kOuts;
  const StreamPart& part = p.part[tile >= first_tiles];
  const int first_row = blockIdx.x * S::kRows, rows_here = min(p.rows - first_row, S::kRows);
  const int block_out = (tile - (tile >= first_tiles ? first_tiles : 0)) * S::kOuts;
  const int pieces = (p.chunks + 7) / 8;
  const int first = pieces * split / p.splits + k_warp;  // piece first + 4 i is this warp's i-th
  const int end = pieces * (split + 1) / p.splits;
  const int count = end > first ? (end - first + 3) / 4 : 0;
  const int most = (end - first + k_warp + 3) / 4;  // the count of the first of these warps

  // W: of a piece a lane has 16 bytes of either half of rows g and g + 8 (gated: of gate and of up).
  const int first_w = part.gated ? (block_out + first_out) / 2 : block_out + first_out;
  const auto row_of = [&](int out) {
    return part.gated ? min(first_w + out % 8, part.outs / 2 - 1) + out / 8 * (part.outs / 2)
                      : min(first_w + out, part.outs - 1);
  };
  // Offsets in bytes of 32 bits: registers are what is short.
  const auto offset_of = [&](int out) {
    return static_cast<uint32_t>(row_of(out)) * static_cast<uint32_t>(part.w_stride) * 2;
  };
  const char* const base_w = reinterpret_cast<const char*>(part.w);
  const uint32_t low = offset_of(g), high = offset_of(g + 8);
  uint4 w[kAhead][2][2];
  const auto load = [&](uint4(&to)[2][2], int i) {
    if (i >= count) return;
    const int chunk = (first + 4 * i) * 8 + t;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Of a last piece of 32 inputs the other half is any weights, and zeros of x.
      const uint32_t at = min(chunk + 4 * half, p.chunks - 1) * 16;
      to[half][0] = LoadStreamed(base_w + (low + at));
      to[half][1] = LoadStreamed(base_w + (high + at));
    }
  };
#pragma unroll
  for (int a = 0; a < kAhead; ++a) load(w[a], a);
  if (lane < 16) {
    const char* const from = base_w + offset_of(lane);
#pragma unroll 1
    for (int i = kAhead; i < count; ++i) PrefetchL2(from + (first + 4 * i) * 128);
  }
  WaitForPrevious();

  // x: as in stream.cuh, brought by the warps of these inputs.
  const char* const x = reinterpret_cast<const char*>(p.x);
  const uint32_t x_stride = static_cast<uint32_t>(p.x_stride) * 2;
  const uint32_t ring = SharedAddress(shared) + k_warp * kRounds * S::kPiece;
  const int thread = threadIdx.x & (S::kGroup - 1), chunk = thread & 7, line = thread >> 3;
  const uint32_t to_line = ring + line * 128 + (chunk ^ 4 * (line & 1)) * 16;
  const auto fetch = [&](int i, int slot) {
    if (i >= count) return;
    const int at = (first + 4 * i) * 8 + chunk;
    const bool there = at < p.chunks;
#pragma unroll
    for (int j = 0; j < S::kPiece / 16 / S::kGroup; ++j) {
      const int row = min(first_row + line + 16 * j, p.rows - 1);
      CopyAsync16Or0(to_line + slot * S::kPiece + j * 2048, x + (row * x_stride + (there ? at * 16 : 0)),
                     there);
    }
  };
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    fetch(r, r);
    CopyAsyncCommit();
  }
  float acc[kTiles][4] = {};
  const uint32_t from_lane = ring + g * 128 + t * 16, swap = 64 * (g & 1);
  int slot = 0, last_slot = kRounds - 1;
#pragma unroll 1
  for (int base = 0; base < count; base += kAhead) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int i = base + a;
      if (i >= count) break;
      if (i == 0) {
        CopyAsyncWaitGroups<kRounds - 1>();
      } else {
        CopyAsyncWaitGroups<kRounds - 2>();
      }
      NamedBarrier(1 + k_warp, S::kGroup);
      if (i > 0) {
        fetch(i - 1 + kRounds, last_slot);
        CopyAsyncCommit();
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 &even = w[a][half][0], &odd = w[a][half][1];
        const uint32_t one[4] = {even.x, odd.x, even.y, odd.y}, two[4] = {even.z, odd.z, even.w, odd.w};
        const uint32_t from = from_lane + slot * S::kPiece + ((64 * half) ^ swap);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const uint4 b = LoadShared4U(from + n * 1024);
          MmaBf16(acc[n], one, b.x, b.y);
          MmaBf16(acc[n], two, b.z, b.w);
        }
      }
      load(w[a], i + kAhead);
      last_slot = slot;
      slot = slot + 1 == kRounds ? 0 : slot + 1;
    }
  }

  // As many barriers in all warps: racecheck does not take a barrier of the block for one between warps that
  // have been at unlike numbers of them.
  if (count < most) NamedBarrier(1 + k_warp, S::kGroup);
  CopyAsyncWait();
  float* const sums = reinterpret_cast<float*>(shared);
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c)
      sums[(k_warp * S::kRows + 8 * n + 2 * t + (c & 1)) * S::kPitch + first_out + 8 * (c >> 1) + g] =
          acc[n][c];
  }
  __syncthreads();
  FinishTile<S>(p, part, {tile, split, first_row, rows_here, block_out, tile >= first_tiles}, sums);
}

}  // namespace kdt::cuda
