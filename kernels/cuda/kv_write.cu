// One block a row.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

template <typename T, typename P>
__global__ void KvWriteKernel(const T* x, int64_t x_stride, int64_t width, const int32_t* slots, P* pool,
                              int64_t pool_stride) {
  LaunchDependents();
  WaitForPrevious();
  const int64_t slot = slots[blockIdx.x];
  if (slot < 0) return;
  for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
    pool[slot * pool_stride + i] = FromFloat<P>(ToFloat(x[blockIdx.x * x_stride + i]));
  }
}

}  // namespace

cudaError_t KvWrite(const Launch& launch, const kernels::KvWriteArgs& args) {
  if (args.x.rows == 0) return cudaSuccess;
  return ByType(args.x.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    return ByType(args.pool.dtype, [&](auto* u) {
      using P = std::remove_pointer_t<decltype(u)>;
      return LaunchAfter(launch, KvWriteKernel<T, P>, dim3(static_cast<unsigned>(args.x.rows)), 256, 0,
                         Data<T>(args.x), args.x.stride, args.x.cols, args.slots, Data<P>(args.pool),
                         args.pool.stride);
    });
  });
}

}  // namespace kdt::cuda
