// Small copies between the device and page-locked memory of the host, by a kernel: among kernels one costs
// less than the change to a copy engine and back.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 128;

template <typename T>
__global__ void CopyKernel(T* to, const T* from, int count) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  LaunchDependents();
  WaitForPrevious();
  if (i < count) to[i] = __ldcv(from + i);  // what the host wrote last
}

template <typename T>
cudaError_t Copy(const Launch& launch, void* to, const void* from, size_t bytes) {
  const auto count = static_cast<int>(bytes / sizeof(T));
  return LaunchAfter(launch, CopyKernel<T>, dim3(static_cast<unsigned>(Blocks(count, kThreads))), kThreads, 0,
                     static_cast<T*>(to), static_cast<const T*>(from), count);
}

}  // namespace

cudaError_t CopyPinned(const Launch& launch, void* to, const void* from, size_t bytes) {
  const size_t odd = reinterpret_cast<size_t>(to) | reinterpret_cast<size_t>(from) | bytes;
  if (bytes == 0) return cudaSuccess;
  if (bytes <= kCopiedByKernel && odd % sizeof(uint4) == 0) return Copy<uint4>(launch, to, from, bytes);
  if (bytes <= kCopiedByKernel && odd % sizeof(int) == 0) return Copy<int>(launch, to, from, bytes);
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, launch.stream);
}

}  // namespace kdt::cuda
