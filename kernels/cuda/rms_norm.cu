// One block a row, two passes over it: the second finds the row in L1 or L2.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

template <typename T, typename O>
__global__ void __launch_bounds__(512)
    RmsNormKernel(const T* x, int64_t x_stride, T* residual, int64_t residual_stride, const bf16* weight,
                  float eps, int64_t n, O* out, int64_t out_stride) {
  __shared__ float shared[32];
  x += blockIdx.x * x_stride;
  out += blockIdx.x * out_stride;
  if (residual != nullptr) residual += blockIdx.x * residual_stride;
  LaunchDependents();
  WaitForPrevious();
  float squares = 0.0f;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    float v = ToFloat(x[i]);
    if (residual != nullptr) {
      const T sum = FromFloat<T>(v + ToFloat(residual[i]));
      residual[i] = sum;
      v = ToFloat(sum);
    }
    squares += v * v;
  }
  const float factor = rsqrtf(BlockSum(squares, shared) / static_cast<float>(n) + eps);
  const T* from = residual != nullptr ? residual : x;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    out[i] = FromFloat<O>(ToFloat(weight[i]) * Rounded<T>(ToFloat(from[i]) * factor));
  }
}

template <typename T>
__global__ void AddKernel(const T* x, int64_t x_stride, T* residual, int64_t residual_stride, int64_t n) {
  LaunchDependents();
  WaitForPrevious();
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    T& sum = residual[blockIdx.x * residual_stride + i];
    sum = FromFloat<T>(ToFloat(sum) + ToFloat(x[blockIdx.x * x_stride + i]));
  }
}

}  // namespace

cudaError_t RmsNorm(const Launch& launch, const kernels::RmsNormArgs& args) {
  if (args.x.rows == 0) return cudaSuccess;
  return ByType(args.x.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    return ByType(args.out.dtype, [&](auto* u) {
      using O = std::remove_pointer_t<decltype(u)>;
      return LaunchAfter(launch, RmsNormKernel<T, O>, dim3(static_cast<unsigned>(args.x.rows)), 512, 0,
                         Data<T>(args.x), args.x.stride, Data<T>(args.residual), args.residual.stride,
                         reinterpret_cast<const bf16*>(args.weight), args.eps, args.x.cols, Data<O>(args.out),
                         args.out.stride);
    });
  });
}

cudaError_t Add(const Launch& launch, const kernels::AddArgs& args) {
  if (args.x.rows == 0) return cudaSuccess;
  return ByType(args.x.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    return LaunchAfter(launch, AddKernel<T>, dim3(static_cast<unsigned>(args.x.rows)), 512, 0,
                       Data<T>(args.x), args.x.stride, Data<T>(args.residual), args.residual.stride,
                       args.x.cols);
  });
}

}  // namespace kdt::cuda
