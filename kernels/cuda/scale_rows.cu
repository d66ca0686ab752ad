#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kEach = 8;  // values a thread

__global__ void __launch_bounds__(kThreads)
    ScaleRowsKernel(float* x, int64_t stride, int64_t cols, const float* factors) {
  LaunchDependents();
  WaitForPrevious();
  const float factor = factors[blockIdx.x];
  if (factor == 1.0f) return;
  float* const row = x + blockIdx.x * stride;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kThreads * kEach + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t at = first + i * kThreads;
    if (at < cols) row[at] *= factor;
  }
}

}  // namespace

cudaError_t ScaleRows(const Launch& launch, const kernels::ScaleRowsArgs& args) {
  if (args.x.rows == 0) return cudaSuccess;
  return LaunchAfter(
      launch, ScaleRowsKernel,
      dim3(static_cast<unsigned>(args.x.rows), static_cast<unsigned>(Blocks(args.x.cols, kThreads * kEach))),
      kThreads, 0, Data<float>(args.x), args.x.stride, args.x.cols, args.factor);
}

}  // namespace kdt::cuda
