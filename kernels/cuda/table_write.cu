#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

__global__ void TableWriteKernel(kernels::TableWriteArgs args) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  LaunchDependents();
  WaitForPrevious();
  if (i < args.count && args.index[i] >= 0) args.table[args.index[i]] = args.value[i];
}

}  // namespace

cudaError_t TableWrite(const Launch& launch, const kernels::TableWriteArgs& args) {
  if (args.count == 0) return cudaSuccess;
  return LaunchAfter(launch, TableWriteKernel, dim3(static_cast<unsigned>(Blocks(args.count, 128))), 128, 0,
                     args);
}

}  // namespace kdt::cuda
