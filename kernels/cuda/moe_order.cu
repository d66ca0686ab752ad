// The experts' weights from the checkpoint's order into the one of moe/int4.cuh, in place, a few experts at a
// time through the workspace. A tile of 32 weight rows is 16 gate rows and the same 16 up rows, or 32 rows of
// down.
#include <algorithm>

#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/moe/int4.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

// Row of the matrix that is row `in_tile` of tile `tile`.
__device__ __forceinline__ int RowOf(int tile, int in_tile, int inner, bool gate_up) {
  if (!gate_up) return tile * kTileRows + in_tile;
  return tile * 16 + (in_tile & 15) + (in_tile >= 16 ? inner : 0);
}

// Thread: one word of the result. The matrices have `rows` rows of `groups` groups.
__global__ void OrderWeightsKernel(const uint32_t* from, uint32_t* to, int64_t words, int rows, int groups,
                                   int inner, bool gate_up) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= words) return;
  const int quarter = i & 3, lane = i >> 2 & 31;
  const int64_t group = i >> 7;  // over all experts and tiles
  const int64_t tile = group / groups, expert = tile / (rows / kTileRows);
  const int row =
      RowOf(static_cast<int>(tile % (rows / kTileRows)), (lane >> 2) + 8 * quarter, inner, gate_up);
  const uint32_t word = from[((expert * rows + row) * groups + group % groups) * 4 + (lane & 3)];
  uint32_t ordered = 0;
#pragma unroll
  for (int n = 0; n < 8; ++n) ordered |= (word >> (4 * n) & 15u) << (4 * (n / 2 + 4 * (n & 1)));
  to[i] = ordered;
}

__global__ void OrderScalesKernel(const uint16_t* from, uint16_t* to, int64_t scales, int rows, int groups,
                                  int inner, bool gate_up) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= scales) return;
  const int quarter = i & 3, g = i >> 2 & 7;
  const int64_t group = i >> 5;
  const int64_t tile = group / groups, expert = tile / (rows / kTileRows);
  const int row = RowOf(static_cast<int>(tile % (rows / kTileRows)), g + 8 * quarter, inner, gate_up);
  to[i] = from[(expert * rows + row) * groups + group % groups];
}

cudaError_t OrderMatrix(const Launch& launch, const uint32_t* weights, const uint16_t* scales,
                        int64_t experts, int64_t rows, int64_t groups, int64_t inner, bool gate_up) {
  const int64_t expert_bytes = rows * groups * 16;
  const int64_t at_once = static_cast<int64_t>(launch.workspace_bytes) / expert_bytes;
  if (at_once == 0) return cudaErrorInvalidValue;
  for (int64_t first = 0; first < experts; first += at_once) {
    const int64_t count = std::min(at_once, experts - first), words = count * expert_bytes / 4,
                  all_scales = words / 4;
    uint32_t* const w = const_cast<uint32_t*>(weights) + first * expert_bytes / 4;
    uint16_t* const s = const_cast<uint16_t*>(scales) + first * rows * groups;
    cudaError_t error =
        cudaMemcpyAsync(launch.workspace, w, words * 4, cudaMemcpyDeviceToDevice, launch.stream);
    if (error != cudaSuccess) return error;
    OrderWeightsKernel<<<Blocks(words, 256), 256, 0, launch.stream>>>(
        static_cast<const uint32_t*>(launch.workspace), w, words, static_cast<int>(rows),
        static_cast<int>(groups), static_cast<int>(inner), gate_up);
    error = cudaMemcpyAsync(launch.workspace, s, all_scales * 2, cudaMemcpyDeviceToDevice, launch.stream);
    if (error != cudaSuccess) return error;
    OrderScalesKernel<<<Blocks(all_scales, 256), 256, 0, launch.stream>>>(
        static_cast<const uint16_t*>(launch.workspace), s, all_scales, static_cast<int>(rows),
        static_cast<int>(groups), static_cast<int>(inner), gate_up);
    if (error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t OrderExperts(const Launch& launch, const kernels::Int4Experts& w) {
  if (w.experts == 0) return cudaSuccess;
  if (w.hidden % kernels::kInt4Group != 0 || w.inner % kernels::kInt4Group != 0) return cudaErrorInvalidValue;
  if (const cudaError_t error = OrderMatrix(launch, w.gate_up, w.gate_up_scale, w.experts, 2 * w.inner,
                                            w.hidden / 32, w.inner, true);
      error != cudaSuccess)
    return error;
  return OrderMatrix(launch, w.down, w.down_scale, w.experts, w.hidden, w.inner / 32, w.inner, false);
}

}  // namespace kdt::cuda
