// y = x W^T for few rows: a stream of W through the tensor cores (W is the A operand, x the B operand), with
// no shared memory on the way in.
//
// A warp takes 32 outputs and up to 64 rows. For 32 inputs it loads 16 bytes a lane and output row: lane (g,
// t) gets inputs 8 t .. 8 t + 7 of row g. The order of inputs within a product does not matter as long as W
// and x agree, so these eight values serve directly as two k16 steps, and x is read the same way. The block's
// eight warps are kOutWarps x kKWarps: warps along k take every kKWarps-th piece of 32 inputs and are summed
// at the end; where one block a tile of outputs would leave the chip empty, blocks share the inputs too and
// the last of them adds the parts up, in order. How the sum is cut depends on the shape of W alone, so a
// row's bits do not depend on the other rows.
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kOuts = 32;  // of a warp
constexpr int kRows = 64;  // of a block
constexpr int kMaxSplits = 16;

struct GemmParams {
  const bf16* x;
  const bf16* w;
  void* y;
  int64_t x_stride, w_stride, y_stride;
  int rows, outs, pieces;  // pieces of 32 inputs
  int splits;
  bool accumulate;
  float* partial;  // [splits][rows][outs]
  unsigned* counters;
};

template <typename Y>
__device__ void Store(const GemmParams& p, int row, int out, float value) {
  Y* to = static_cast<Y*>(p.y) + row * p.y_stride + out;
  *to = FromFloat<Y>(p.accumulate ? ToFloat(*to) + value : value);
}

template <typename Y, int kOutWarps, int kTiles>
__global__ void __launch_bounds__(32 * kWarps, kTiles <= 4 ? 2 : 1)
    GemmKernel(const __grid_constant__ GemmParams p) {
  constexpr int kKWarps = kWarps / kOutWarps;
  constexpr int kAhead = kTiles <= 2 ? 4 : 2;
  constexpr int kTileRows = 8 * kTiles;
  extern __shared__ float sums[];  // [kKWarps][kOutWarps * 32][kTileRows + 1]
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int g = lane >> 2, t = lane & 3;
  const int out_warp = warp % kOutWarps, k_warp = warp / kOutWarps;
  const int block_out = blockIdx.x * kOutWarps * kOuts;
  const int first_row = blockIdx.y * kRows;
  const int piece_end = static_cast<int>(static_cast<int64_t>(p.pieces) * (blockIdx.z + 1) / p.splits);
  int piece = static_cast<int>(static_cast<int64_t>(p.pieces) * blockIdx.z / p.splits) + k_warp;

  // Rows past the end read the last one; what they give is not stored.
  const bf16* w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    w[i] = p.w + min(block_out + out_warp * kOuts + 8 * i + g, p.outs - 1) * p.w_stride + 8 * t;
  const bf16* x[kTiles];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) x[n] = p.x + min(first_row + 8 * n + g, p.rows - 1) * p.x_stride + 8 * t;

  float acc[2][kTiles][4];
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) acc[m][n][c] = 0.0f;
  uint4 a[kAhead][4];
  auto fetch = [&](int from, uint4(&to)[4]) {
    if (from >= piece_end) return;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      to[i] = __ldcs(reinterpret_cast<const uint4*>(w[i] + static_cast<int64_t>(from) * 32));
  };
#pragma unroll
  for (int d = 0; d < kAhead; ++d) fetch(piece + d * kKWarps, a[d]);
  for (; piece < piece_end; piece += kAhead * kKWarps) {
#pragma unroll
    for (int d = 0; d < kAhead; ++d) {
      const int now = piece + d * kKWarps;
      if (now >= piece_end) break;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const uint4 b = __ldg(reinterpret_cast<const uint4*>(x[n] + static_cast<int64_t>(now) * 32));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const uint4 &low = a[d][2 * m], &high = a[d][2 * m + 1];  // rows g and g + 8
          const uint32_t first[4] = {low.x, high.x, low.y, high.y},
                         second[4] = {low.z, high.z, low.w, high.w};
          MmaBf16(acc[m][n], first, b.x, b.y);
          MmaBf16(acc[m][n], second, b.z, b.w);
        }
      }
      fetch(now + kAhead * kKWarps, a[d]);
    }
  }

#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int out = out_warp * kOuts + 16 * m + 8 * (c >> 1) + g;
        sums[(k_warp * kOutWarps * kOuts + out) * (kTileRows + 1) + 8 * n + 2 * t + (c & 1)] = acc[m][n][c];
      }
    }
  }
  __syncthreads();
  constexpr int kBlockOuts = kOutWarps * kOuts;
  for (int i = threadIdx.x; i < kBlockOuts * kTileRows; i += blockDim.x) {
    const int out = i % kBlockOuts, row = i / kBlockOuts;
    if (block_out + out >= p.outs || first_row + row >= p.rows) continue;
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kKWarps; ++k) sum += sums[(k * kBlockOuts + out) * (kTileRows + 1) + row];
    if (p.splits == 1) {
      Store<Y>(p, first_row + row, block_out + out, sum);
    } else {
      p.partial[(static_cast<int64_t>(blockIdx.z) * p.rows + first_row + row) * p.outs + block_out + out] =
          sum;
    }
  }
  if (p.splits == 1) return;

  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned* counter = p.counters + blockIdx.y * gridDim.x + blockIdx.x;
    last = atomicAdd(counter, 1) == static_cast<unsigned>(p.splits) - 1;
    if (last) *counter = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int i = threadIdx.x; i < kBlockOuts * kTileRows; i += blockDim.x) {
    const int out = block_out + i % kBlockOuts, row = first_row + i / kBlockOuts;
    if (out >= p.outs || row >= p.rows) continue;
    float sum = 0.0f;
    for (int s = 0; s < p.splits; ++s)
      sum += __ldcg(p.partial + (static_cast<int64_t>(s) * p.rows + row) * p.outs + out);
    Store<Y>(p, row, out, sum);
  }
}

template <typename Y, int kOutWarps, int kTiles>
cudaError_t Run(const Launch& launch, const GemmParams& p) {
  constexpr int kBytes = kWarps * kOuts * (8 * kTiles + 1) * 4;
  static const cudaError_t prepared = cudaFuncSetAttribute(
      GemmKernel<Y, kOutWarps, kTiles>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (prepared != cudaSuccess) return prepared;
  const dim3 grid(Blocks(p.outs, kOutWarps * kOuts), Blocks(p.rows, kRows), p.splits);
  if (grid.x * grid.y > kCounters) return cudaErrorInvalidValue;
  GemmKernel<Y, kOutWarps, kTiles><<<grid, 32 * kWarps, kBytes, launch.stream>>>(p);
  return cudaGetLastError();
}

template <typename Y, int kOutWarps>
cudaError_t ForRows(const Launch& launch, const GemmParams& p) {
  if (p.rows <= 8) return Run<Y, kOutWarps, 1>(launch, p);
  if (p.rows <= 16) return Run<Y, kOutWarps, 2>(launch, p);
  if (p.rows <= 32) return Run<Y, kOutWarps, 4>(launch, p);
  return Run<Y, kOutWarps, 8>(launch, p);
}

}  // namespace

cudaError_t Gemm(const Launch& launch, const kernels::GemmArgs& args) {
  if (args.x.rows == 0 || args.w.rows == 0) return cudaSuccess;
  const bool fits = args.x.dtype == kernels::DType::kBF16 && args.w.dtype == kernels::DType::kBF16 &&
                    args.x.cols % 32 == 0 && args.x.stride % 8 == 0 && args.w.stride % 8 == 0;
  if (!fits) return cudaErrorInvalidValue;
  GemmParams p;
  p.x = Data<bf16>(args.x);
  p.w = Data<bf16>(args.w);
  p.y = args.y.data;
  p.x_stride = args.x.stride;
  p.w_stride = args.w.stride;
  p.y_stride = args.y.stride;
  p.rows = static_cast<int>(args.x.rows);
  p.outs = static_cast<int>(args.w.rows);
  p.pieces = static_cast<int>(args.x.cols / 32);
  p.accumulate = args.accumulate;
  p.partial = static_cast<float*>(launch.workspace);
  p.counters = launch.counters;
  // Wide matrices: four warps side by side read x together. Narrow ones: all warps along k, and blocks too.
  const bool wide = p.outs >= 4096;
  const int tiles = Blocks(p.outs, wide ? 4 * kOuts : kOuts);
  const int wanted = 2 * launch.processors / tiles;  // blocks a tile to fill the chip
  const int most = p.pieces / (wide ? 4 : 16);       // each warp of a split should have two pieces or more
  p.splits = wanted < 1 ? 1 : wanted;
  if (p.splits > most) p.splits = most < 1 ? 1 : most;
  if (p.splits > kMaxSplits) p.splits = kMaxSplits;
  if (p.splits > 1 && static_cast<size_t>(p.splits) * p.rows * p.outs * 4 > launch.workspace_bytes) {
    return cudaErrorInvalidValue;
  }
  if (args.y.dtype == kernels::DType::kF32) {
    return wide ? ForRows<float, 4>(launch, p) : ForRows<float, 1>(launch, p);
  }
  return wide ? ForRows<bf16, 4>(launch, p) : ForRows<bf16, 1>(launch, p);
}

}  // namespace kdt::cuda
