// y = x W^T for many rows: 128 rows by kOuts outputs a block, 64 inputs a stage through a ring in shared
// memory (cp.async, 16-byte chunks swizzled within 128-byte rows), four warps of 64 x kOuts / 2. x is the A
// operand. A matrix too small to fill the chip shares its inputs among `splits` blocks as in stream.cuh.
#pragma once

#include "kernels/cuda/gemm/stream.cuh"

namespace kdt::cuda {

template <int kOuts_>
struct TileShape {
  static constexpr int kOuts = kOuts_, kRows = 128, kInputs = 64, kThreads = 128;
  static constexpr int kStages = kOuts == 128 ? 3 : 4;
  static constexpr int kStage = (kRows + kOuts) * kInputs * 2;
  static constexpr int kShared = kStages * kStage;
  static_assert(kShared <= 101376 - 64);
};

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 2) TileKernel(const __grid_constant__ StreamParams p) {
  constexpr int kStages = S::kStages, kTiles = S::kOuts / 16;  // of 8 outputs, of a warp
  extern __shared__ uint4 shared[];
  const StreamPart& part = p.part[0];
  LaunchDependents();
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int g = lane >> 2, t = lane & 3;
  const int tile = blockIdx.y / p.splits, split = blockIdx.y - tile * p.splits;
  const int block_row = blockIdx.x * S::kRows, block_out = tile * S::kOuts;
  const int steps = (p.chunks + 7) / 8;
  const int begin = static_cast<int>(static_cast<int64_t>(steps) * split / p.splits);
  const int end = static_cast<int>(static_cast<int64_t>(steps) * (split + 1) / p.splits);
  const uint32_t ring = SharedAddress(shared);

  // A thread brings chunk `chunk` of rows threadIdx.x / 8 + 16 i.
  const int chunk = threadIdx.x & 7, line = threadIdx.x >> 3;
  const uint32_t to = (line * 8 + (chunk ^ (line & 7))) * 16;
  const bf16* const w = part.w + block_out * part.w_stride + chunk * 8;
  const bf16* const x = p.x + block_row * p.x_stride + chunk * 8;
  const int last_out = part.outs - 1 - block_out, last_row = p.rows - 1 - block_row;
  // The last step may be half empty: its chunks are read from the row's end and multiplied with zeros of x.
  auto fetch_w = [&](int step, int slot) {
    const int at = min(step * 8, p.chunks - 1 - chunk) * 8;
#pragma unroll
    for (int i = 0; i < S::kOuts / 16; ++i)
      CopyAsync16(ring + slot * S::kStage + S::kRows * 128 + to + i * 2048,
                  w + min(line + 16 * i, last_out) * static_cast<int>(part.w_stride) + at);
  };
  auto fetch_x = [&](int step, int slot) {
    const bool there = step * 8 + chunk < p.chunks;
    const int at = there ? step * 64 : 0;
#pragma unroll
    for (int i = 0; i < S::kRows / 16; ++i)
      CopyAsync16Or0(ring + slot * S::kStage + to + i * 2048,
                     x + min(line + 16 * i, last_row) * static_cast<int>(p.x_stride) + at, there);
  };
#pragma unroll
  for (int d = 0; d < kStages - 1; ++d) {
    if (begin + d < end) fetch_w(begin + d, d);
  }
  WaitForPrevious();
#pragma unroll
  for (int d = 0; d < kStages - 1; ++d) {
    if (begin + d < end) fetch_x(begin + d, d);
    CopyAsyncCommit();
  }

  const int warp_row = warp / 2 * 64, warp_out = warp % 2 * (S::kOuts / 2);
  // ldmatrix: lane l gives row l % 16 (x) or l % 8 + 8 (l / 16) (W) of its 16 x 16 tile.
  const int x_line = warp_row + (lane & 15), x_chunk = lane >> 4;
  const int w_line = warp_out + (lane & 7) + 8 * (lane >> 4), w_chunk = lane >> 3 & 1;
  float acc[4][kTiles][4] = {};
  int slot = 0, filled = kStages - 1;
#pragma unroll 1
  for (int step = begin; step < end; ++step) {
    CopyAsyncWaitGroups<kStages - 2>();
    __syncthreads();
    if (step + kStages - 1 < end) {
      fetch_w(step + kStages - 1, filled);
      fetch_x(step + kStages - 1, filled);
    }
    CopyAsyncCommit();
    const uint32_t from = ring + slot * S::kStage;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint32_t a[4][4];
#pragma unroll
      for (int m = 0; m < 4; ++m)
        LoadMatrix4(a[m], from + ((x_line + 16 * m) * 8 + ((2 * k + x_chunk) ^ (x_line & 7))) * 16);
#pragma unroll
      for (int n = 0; n < kTiles; n += 2) {
        uint32_t b[4];
        LoadMatrix4(b,
                    from + S::kRows * 128 + ((w_line + 8 * n) * 8 + ((2 * k + w_chunk) ^ (w_line & 7))) * 16);
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          MmaBf16(acc[m][n], a[m], b[0], b[1]);
          MmaBf16(acc[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
    filled = slot;
    slot = slot + 1 == kStages ? 0 : slot + 1;
  }

  // Two outputs a lane and row; pairs of neighbouring lanes swap so that a lane has four of one row.
  const int padded_outs = (part.outs + 3) & ~3;
  const bool odd = (t & 1) != 0;
#pragma unroll
  for (int m = 0; m < 4; ++m) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float mine0 = odd ? acc[m][n][2] : acc[m][n][0], mine1 = odd ? acc[m][n][3] : acc[m][n][1];
      const float other0 = __shfl_xor_sync(~0u, odd ? acc[m][n][0] : acc[m][n][2], 1);
      const float other1 = __shfl_xor_sync(~0u, odd ? acc[m][n][1] : acc[m][n][3], 1);
      const int row = block_row + warp_row + 16 * m + g + (odd ? 8 : 0);
      const int out = block_out + warp_out + 8 * n + 4 * (t >> 1);
      const float4 v =
          odd ? make_float4(other0, other1, mine0, mine1) : make_float4(mine0, mine1, other0, other1);
      if (row >= p.rows || out >= part.outs) continue;
      if (p.splits == 1) {
        StoreOuts(part, p.accumulate, row * part.y_stride + out, out, v);
      } else {
        __stcg(reinterpret_cast<float4*>(p.partial +
                                         (static_cast<int64_t>(split) * p.rows + row) * padded_outs + out),
               v);
      }
    }
  }
  if (p.splits == 1) return;
  if (!ComesLast(p.counters + blockIdx.x * (gridDim.y / p.splits) + tile, p.splits)) return;
  const int64_t share = static_cast<int64_t>(p.rows) * padded_outs;
  for (int i = threadIdx.x; i < S::kRows * (S::kOuts / 4); i += S::kThreads) {
    const int row = block_row + i / (S::kOuts / 4), out = block_out + i % (S::kOuts / 4) * 4;
    if (row >= p.rows || out >= part.outs) continue;
    const float* parts = p.partial + static_cast<int64_t>(row) * padded_outs + out;
    float4 sum = __ldcg(reinterpret_cast<const float4*>(parts));
    for (int s = 1; s < p.splits; ++s) {
      const float4 v = __ldcg(reinterpret_cast<const float4*>(parts + s * share));
      sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
    }
    StoreOuts(part, p.accumulate, row * part.y_stride + out, out, sum);
  }
}

}  // namespace kdt::cuda
