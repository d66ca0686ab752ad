// y = x W^T for up to 16 rows and large matrices: a block a multiprocessor, each with an even share of the
// outputs, whatever number that is, and all inputs. No multiprocessor has a tile more than another, and
// nothing is handed from block to block.
//
// The sums are those of gemm/stream.cuh bit for bit: for each of the stream's shares, four warps take every
// fourth piece of 64 inputs in one accumulator each; a share's four are added in order, then the shares. A
// warp has a ring of its own, a slot of which is a piece of W with the same inputs of all rows behind it:
// what a product needs comes together and is waited for once. Two blocks fit a multiprocessor where the
// device has the room, so the next kernel's rings are full when this one ends. More outputs than a slot has
// lines for are several tiles, which the rings run through without a stop.
#pragma once

#include "kernels/cuda/gemm/stream.cuh"

namespace kdt::cuda {

inline constexpr int kEvenRows = 16;

// Up to kLines outputs a tile and 8 kTiles rows; kShares shares of the inputs, kEach of them one after the
// other in a warp; kDepth slots a warp. The next kernel is let in kLate pieces before a block's end, with 0
// at its start. kMany: more than one tile a block.
template <int kLines_, int kTiles_, int kShares_, int kEach_, int kDepth_, int kLate_, bool kMany_ = false>
struct EvenShape {
  static constexpr int kLines = kLines_, kTiles = kTiles_, kShares = kShares_, kEach = kEach_;
  static constexpr int kDepth = kDepth_, kLate = kLate_;
  static constexpr bool kMany = kMany_;
  static constexpr int kM = (kLines + 15) / 16, kRows = 8 * kTiles, kOuts = 16 * kM;
  static constexpr int kWarps = 4 * kShares / kEach, kThreads = 32 * kWarps;
  static constexpr int kW = kLines * 128, kSlot = kW + kRows * 128;  // bytes of a slot; of W in it
  static constexpr int kRing = kWarps * kDepth * kSlot;
  static constexpr int kPitch = kOuts + 4, kSums = 4 * kShares * kRows * kPitch * 4;
  // Sums of a tile have a place of their own where the rings go on.
  static constexpr int kShared = kMany ? kRing + kSums : kRing > kSums ? kRing : kSums;
  static_assert(kShared <= 101376 && kLines % 4 == 0 && kShares % kEach == 0 && (kEach == 1 || !kMany));
};

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 2) EvenKernel(const __grid_constant__ StreamParams p) {
  constexpr int kM = S::kM, kTiles = S::kTiles, kShares = S::kShares, kEach = S::kEach, kDepth = S::kDepth;
  extern __shared__ uint4 shared[];
  if (S::kLate == 0) LaunchDependents();
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int g = lane >> 2, t = lane & 3, line = lane >> 3, chunk = lane & 7;
  const StreamPart& part = p.part[0];
  const auto border = [&](unsigned block) {
    return static_cast<int>(static_cast<int64_t>(part.outs) * block / gridDim.x);
  };
  const int block_out = border(blockIdx.x), outs = border(blockIdx.x + 1) - block_out;
  const int tiles = S::kMany ? (outs + S::kLines - 1) / S::kLines : 1;
  const auto tile_border = [&](int tile) { return S::kMany ? outs * tile / tiles : tile * outs; };

  // A warp's i-th piece of a tile is from[e] + 4 i where i is below upto[e] for the first time.
  const int pieces = (p.chunks + 7) / 8;
  int from[kEach], upto[kEach], count = 0;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int share = warp / 4 * kEach + e;
    const int begin = pieces * share / kShares + warp % 4, end = pieces * (share + 1) / kShares;
    from[e] = begin - 4 * count;
    count += end > begin ? (end - begin + 3) / 4 : 0;
    upto[e] = count;
  }
  const auto piece_at = [&](int i) {
    int first = from[kEach - 1];
#pragma unroll
    for (int e = kEach - 2; e >= 0; --e) first = i < upto[e] ? from[e] : first;
    return 4 * i + first;
  };

  // In a copy eight lanes take a row's 128 bytes, chunks of odd rows swapped by fours (stream.cuh).
  const uint32_t ring = SharedAddress(shared) + warp * kDepth * S::kSlot;
  const uint32_t at_line = line * 128 + (chunk ^ 4 * (line & 1)) * 16;
  int ahead = 0, ahead_tile = 0,
      lines = tile_border(1);  // the piece that is copied next; outputs of its tile
  const bf16* w = part.w + (block_out + line) * part.w_stride;
  const auto fetch_w = [&](int slot) {
    const bf16* at = w + min(piece_at(ahead) * 8 + chunk, p.chunks - 1) * 8;
#pragma unroll
    for (int i = 0; i < S::kLines / 4; ++i) {
      if (4 * i + line < lines) CopyAsync16(ring + slot * S::kSlot + i * 512 + at_line, at);
      at += 4 * part.w_stride;
    }
  };
  // Of a last piece of 32 inputs the other half is any weights, and zeros of x.
  const auto fetch_x = [&](int i, int slot) {
    const int at = piece_at(i) * 8 + chunk;
    const bool there = at < p.chunks;
    const bf16* const x = p.x + line * p.x_stride + (there ? at : 0) * 8;
#pragma unroll
    for (int j = 0; j < 2 * kTiles; ++j) {
      if (4 * j + line < p.rows)
        CopyAsync16Or0(ring + slot * S::kSlot + S::kW + j * 512 + at_line, x + 4 * j * p.x_stride, there);
    }
  };
  const auto is_more = [&] { return S::kMany ? ahead_tile < tiles : ahead < count; };
  const auto go_on = [&] {
    if (++ahead < count || !S::kMany) return;
    ahead = 0, ++ahead_tile;
    const int first = tile_border(ahead_tile);
    lines = tile_border(ahead_tile + 1) - first;
    w = part.w + (block_out + first + line) * part.w_stride;
  };
#pragma unroll
  for (int d = 0; d < kDepth; ++d) {
    if (is_more()) {
      fetch_w(d);
      go_on();
    }
    CopyAsyncCommit();
  }
  WaitForPrevious();
#pragma unroll
  for (int d = 0; d < kDepth; ++d) {
    if (d < count) fetch_x(d, d);
  }
  CopyAsyncWait();

  float acc[kEach][kM][kTiles][4] = {};
  float* const sums = reinterpret_cast<float*>(shared) + (S::kMany ? S::kRing / 4 : 0);
  const uint32_t at_lane = ring + g * 128 + t * 16, swap = 64 * (g & 1);
  int slot = 0, left = tiles * count;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
#pragma unroll 1
      for (int i = e == 0 ? 0 : upto[e > 0 ? e - 1 : 0]; i < upto[e]; ++i) {
        if (S::kLate > 0 && left-- == S::kLate) LaunchDependents();
        CopyAsyncWaitGroups<kDepth - 1>();
        __syncwarp();
        const uint32_t from_slot = at_lane + slot * S::kSlot;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t side = (64 * half) ^ swap;
          uint4 a[2 * kM], b[kTiles];
#pragma unroll
          for (int m = 0; m < 2 * kM; ++m) {  // of lines that nobody copied nothing is stored
            a[m] = 8 * m < S::kLines ? LoadShared4U(from_slot + m * 1024 + side) : make_uint4(0, 0, 0, 0);
          }
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            b[n] = LoadShared4U(from_slot + S::kW + n * 1024 + side);
          }
          // All tiles' first halves, then all second ones: the two of a tile wait for each other.
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
#pragma unroll
            for (int m = 0; m < kM; ++m) {
              const uint32_t even[4] = {a[2 * m].x, a[2 * m + 1].x, a[2 * m].y, a[2 * m + 1].y};
              MmaBf16(acc[e][m][n], even, b[n].x, b[n].y);
            }
          }
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
#pragma unroll
            for (int m = 0; m < kM; ++m) {
              const uint32_t odd[4] = {a[2 * m].z, a[2 * m + 1].z, a[2 * m].w, a[2 * m + 1].w};
              MmaBf16(acc[e][m][n], odd, b[n].z, b[n].w);
            }
          }
        }
        __syncwarp();
        if (is_more()) {
          fetch_w(slot);
          fetch_x(ahead, slot);
          go_on();
        }
        CopyAsyncCommit();
        slot = slot + 1 == kDepth ? 0 : slot + 1;
      }
    }

    // Where the sums take the rings' place: when all have read those. Else: when the last tile's are read.
    if (!S::kMany || tile > 0) __syncthreads();
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int first_row = (warp / 4 * kEach + e) * 4 + warp % 4;  // share, warp along the inputs
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            sums[(first_row * S::kRows + 8 * n + 2 * t + (c & 1)) * S::kPitch + 16 * m + 8 * (c >> 1) + g] =
                acc[e][m][n][c];
            acc[e][m][n][c] = 0.0f;
          }
        }
      }
    }
    __syncthreads();
    const int first_out = tile_border(tile), here = tile_border(tile + 1) - first_out;
    for (int i = threadIdx.x; i < p.rows * S::kOuts; i += S::kThreads) {
      const int row = i / S::kOuts, out = i % S::kOuts;
      if (out >= here) continue;
      float sum = 0.0f;
#pragma unroll
      for (int s = 0; s < kShares; ++s) {
        const float* const of = sums + (4 * s * S::kRows + row) * S::kPitch + out;
        float share = of[0];
#pragma unroll
        for (int k = 1; k < 4; ++k) share += of[k * S::kRows * S::kPitch];
        sum = s == 0 ? share : sum + share;
      }
      StoreOut(part, p.accumulate, row * part.y_stride + block_out + first_out + out, sum);
    }
  }
}

}  // namespace kdt::cuda
