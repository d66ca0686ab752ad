#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

template <typename T>
__global__ void SiluMulKernel(const T* x, int64_t x_stride, int64_t n, T* out, int64_t out_stride) {
  const int64_t i = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  LaunchDependents();
  WaitForPrevious();
  if (i >= n) return;
  const float gate = ToFloat(x[blockIdx.x * x_stride + i]), up = ToFloat(x[blockIdx.x * x_stride + n + i]);
  out[blockIdx.x * out_stride + i] = FromFloat<T>(Silu(gate) * up);
}

}  // namespace

cudaError_t SiluMul(const Launch& launch, const kernels::SiluMulArgs& args) {
  if (args.out.rows == 0) return cudaSuccess;
  return ByType(args.x.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    return LaunchAfter(launch, SiluMulKernel<T>,
                       dim3(static_cast<unsigned>(args.out.rows), Blocks(args.out.cols, 256)), 256, 0,
                       Data<T>(args.x), args.x.stride, args.out.cols, Data<T>(args.out), args.out.stride);
  });
}

}  // namespace kdt::cuda
