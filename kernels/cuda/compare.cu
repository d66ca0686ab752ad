// A block a row: the row's largest reference value, then the distances; one atomic a block and figure.
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 256;

// Size of a bf16 step at x >= 0, a finite number that bf16 holds: 2^(e - 7), of which those below 2^-126 are
// denormal.
__device__ float StepOf(float x) {
  return ldexpf(1.0f, max(static_cast<int>(__float_as_uint(x) >> 23), 1) - 134);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) CompareKernel(const __grid_constant__ kernels::CompareArgs p) {
  __shared__ float tops[32];
  __shared__ unsigned beyond[2], far[2];
  const int64_t row = blockIdx.x;
  if (p.used_rows != nullptr && row >= *p.used_rows) return;
  const T* value = static_cast<const T*>(p.value.data) + row * p.value.stride;
  const T* reference = static_cast<const T*>(p.reference.data) + row * p.reference.stride;
  const int cols = static_cast<int>(p.value.cols);
  if (threadIdx.x < 2) beyond[threadIdx.x] = far[threadIdx.x] = 0;
  float top = 0.0f;
  for (int c = threadIdx.x; c < cols; c += kThreads) {
    const float x = fabsf(Rounded<bf16>(ToFloat(reference[c])));
    if (isfinite(x)) top = fmaxf(top, x);
  }
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  if ((threadIdx.x & 31) == 0) tops[threadIdx.x >> 5] = top;
  __syncthreads();
  for (int i = 0; i < kThreads / 32; ++i) top = fmaxf(top, tops[i]);
  const float row_step = StepOf(top);
  unsigned own_beyond = 0, row_beyond = 0;
  float own_far = 0.0f, row_far = 0.0f;
  for (int c = threadIdx.x; c < cols; c += kThreads) {
    const float x = ToFloat(value[c]), exact = Rounded<bf16>(ToFloat(reference[c]));
    float own = 0.0f, of_row = 0.0f;
    if (isfinite(x) && isfinite(exact)) {
      const float distance = fabsf(x - exact);
      own = distance / StepOf(fabsf(exact));
      of_row = distance / row_step;
    } else if (x != exact && !(isnan(x) && isnan(exact))) {
      own = of_row = INFINITY;
    }
    own_beyond += own > 1.0f, row_beyond += of_row > 1.0f;
    own_far = fmaxf(own_far, own), row_far = fmaxf(row_far, of_row);
  }
  // Distances are not negative, so their bits are ordered as they are.
  atomicAdd(&beyond[0], own_beyond);
  atomicAdd(&beyond[1], row_beyond);
  atomicMax(&far[0], __float_as_uint(own_far));
  atomicMax(&far[1], __float_as_uint(row_far));
  __syncthreads();
  if (threadIdx.x != 0) return;
  const auto add = [](uint64_t* to, uint64_t count) {
    atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(count));
  };
  add(&p.stats->values, cols);
  add(&p.stats->beyond_one, beyond[0]);
  add(&p.stats->beyond_one_of_row, beyond[1]);
  atomicMax(reinterpret_cast<unsigned*>(&p.stats->largest), far[0]);
  atomicMax(reinterpret_cast<unsigned*>(&p.stats->largest_of_row), far[1]);
}

}  // namespace

cudaError_t Compare(const Launch& launch, const kernels::CompareArgs& args) {
  if (args.value.dtype != args.reference.dtype || args.value.rows != args.reference.rows ||
      args.value.cols != args.reference.cols || args.stats == nullptr) {
    return cudaErrorInvalidValue;
  }
  if (args.value.rows == 0 || args.value.cols == 0) return cudaSuccess;
  return ByType(args.value.dtype, [&](auto* type) {
    CompareKernel<std::remove_pointer_t<decltype(type)>>
        <<<static_cast<int>(args.value.rows), kThreads, 0, launch.stream>>>(args);
    return cudaGetLastError();
  });
}

}  // namespace kdt::cuda
