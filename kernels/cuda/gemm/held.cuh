// y = x W^T for at most eight rows and few inputs: a block's weights are all on chip before it waits for the
// kernel in front, and x goes straight into registers, all of it at once. What is left behind the wait is one
// trip to L2, the products, and the warps' sums.
//
// The sums are those of gemm/stream.cuh without shares bit for bit: warp k of four takes pieces k, k + 4, ...
// of 64 inputs in one accumulator, these are added in order.
#pragma once

#include "kernels/cuda/gemm/stream.cuh"

namespace kdt::cuda {

inline constexpr int kHeldRows = 8;

// 16 kM outputs; up to kCount pieces a warp, the last kInRegisters of them in registers, the others in shared
// memory; kBlocks blocks a multiprocessor.
template <int kM_, int kCount_, int kInRegisters_, int kBlocks_>
struct HeldShape {
  static constexpr int kM = kM_, kCount = kCount_, kShared = kCount_ - kInRegisters_, kBlocks = kBlocks_;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kOuts = 16 * kM, kInputs = 64 * kWarps * kCount;
  static constexpr int kSlot = kOuts * 128;  // bytes of a piece
  static constexpr int kSharedBytes = kWarps * kShared * kSlot;
  static constexpr int kPitch = kOuts + 4;  // floats of a row in the exchange
};

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    HeldKernel(const __grid_constant__ StreamParams p) {
  constexpr int kM = S::kM, kCount = S::kCount, kShared = S::kShared, kInRegisters = kCount - kShared;
  extern __shared__ uint4 shared[];
  __shared__ __align__(16) float sums[S::kWarps * kHeldRows * S::kPitch];
  LaunchDependents();
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int g = lane >> 2, t = lane & 3;
  const StreamPart& part = p.part[0];
  const int head = blockIdx.y, block_out = blockIdx.x * S::kOuts;
  const int pieces = (p.chunks + 7) / 8;
  const bf16* const w = part.w + head * p.w_head + block_out * part.w_stride;
  const int last_out = part.outs - 1 - block_out;  // those behind it repeat it, and are not stored

  // As in gemm/stream.cuh: eight lanes copy a row's 128 bytes, chunks of odd rows swapped by fours.
  const int line = lane >> 3, chunk = lane & 7;
  const uint32_t ring = SharedAddress(shared) + warp * kShared * S::kSlot;
#pragma unroll
  for (int i = 0; i < 4 * kM; ++i) {
    const bf16* const from = w + min(4 * i + line, last_out) * static_cast<int>(part.w_stride);
#pragma unroll
    for (int s = 0; s < kShared; ++s) {
      const int piece = warp + 4 * s;
      if (piece < pieces)
        CopyAsync16(ring + s * S::kSlot + i * 512 + line * 128 + (chunk ^ 4 * (line & 1)) * 16,
                    from + min(piece * 8 + chunk, p.chunks - 1) * 8);
    }
  }
  uint4 held[kInRegisters > 0 ? kInRegisters : 1][2][2 * kM];
#pragma unroll
  for (int s = 0; s < kInRegisters; ++s) {
    const int piece = warp + 4 * (kShared + s);
    if (piece >= pieces) break;
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const bf16* const from = w + min(8 * i + g, last_out) * static_cast<int>(part.w_stride);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        held[s][half][i] = LoadStreamed(from + min(piece * 8 + 4 * half + t, p.chunks - 1) * 8);
    }
  }
  WaitForPrevious();

  const bf16* const x = p.x + head * p.x_head + min(g, p.rows - 1) * p.x_stride + 8 * t;
  uint4 in[kCount][2];
#pragma unroll
  for (int s = 0; s < kCount; ++s) {
    const int piece = warp + 4 * s;
    if (piece >= pieces) break;
    in[s][0] = __ldcg(reinterpret_cast<const uint4*>(x + piece * 64));
    // A last piece of 32 inputs: what W has there is multiplied with zeros.
    in[s][1] = piece * 8 + 4 < p.chunks ? __ldcg(reinterpret_cast<const uint4*>(x + piece * 64 + 32))
                                        : make_uint4(0, 0, 0, 0);
  }
  CopyAsyncWait();
  __syncwarp();
  float acc[kM][4] = {};
  const uint32_t from_lane = ring + g * 128 + t * 16, swap = 64 * (g & 1);
#pragma unroll
  for (int s = 0; s < kCount; ++s) {
    if (warp + 4 * s >= pieces) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4& b = in[s][half];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        uint4 low, high;  // outputs g and g + 8
        if (s < kShared) {
          const uint32_t from = from_lane + s * S::kSlot + m * 2048 + ((64 * half) ^ swap);
          low = LoadShared4U(from), high = LoadShared4U(from + 1024);
        } else {
          low = held[s < kShared ? 0 : s - kShared][half][2 * m];
          high = held[s < kShared ? 0 : s - kShared][half][2 * m + 1];
        }
        AddFirst(acc[m], low, high, b);
        AddSecond(acc[m], low, high, b);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int c = 0; c < 4; ++c)
      sums[(warp * kHeldRows + 2 * t + (c & 1)) * S::kPitch + 16 * m + 8 * (c >> 1) + g] = acc[m][c];
  }
  __syncthreads();
  const int row = threadIdx.x / (S::kOuts / 4), out = threadIdx.x % (S::kOuts / 4) * 4;
  if (row >= p.rows || block_out + out >= part.outs) return;
  float4 sum = *reinterpret_cast<const float4*>(sums + row * S::kPitch + out);
#pragma unroll
  for (int k = 1; k < S::kWarps; ++k) {
    const float4 v = *reinterpret_cast<const float4*>(sums + (k * kHeldRows + row) * S::kPitch + out);
    sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
  }
  StoreOuts(part, p.accumulate, head * p.y_head + row * part.y_stride + block_out + out, block_out + out,
            sum);
}

}  // namespace kdt::cuda
