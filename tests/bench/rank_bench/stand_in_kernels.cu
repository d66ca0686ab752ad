#include <algorithm>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/types.cuh"
#include "tests/bench/rank_bench/stand_in_kernels.h"

namespace kdt::bench {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 36;

__device__ int64_t Now() {
  int64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__device__ void WaitUntil(int64_t time) {
  while (Now() < time) __nanosleep(100);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    ReduceKernel(T* x, const T* others, int peers, int64_t count, int64_t nanoseconds) {
  constexpr int kVector = 16 / sizeof(T);
  cuda::WaitForPrevious();
  const int64_t end = Now() + nanoseconds;
  const int64_t step = int64_t{gridDim.x} * kThreads * kVector;
  for (int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kVector; i < count; i += step) {
    float sum[kVector];
    uint4 own = *reinterpret_cast<const uint4*>(x + i);
    auto* values = reinterpret_cast<T*>(&own);
    for (int j = 0; j < kVector; ++j) sum[j] = cuda::ToFloat(values[j]);
    for (int p = 0; p < peers - 1; ++p) {
      const uint4 other = __ldcg(reinterpret_cast<const uint4*>(others + p * count + i));
      const auto* more = reinterpret_cast<const T*>(&other);
      for (int j = 0; j < kVector; ++j) sum[j] += cuda::ToFloat(more[j]);
    }
    for (int j = 0; j < kVector; ++j) values[j] = cuda::FromFloat<T>(sum[j]);
    *reinterpret_cast<uint4*>(x + i) = own;
  }
  cuda::LaunchDependents();
  WaitUntil(end);
}

__global__ void __launch_bounds__(kThreads)
    GatherKernel(const uint32_t* in, int64_t words, uint32_t* out, int64_t nanoseconds) {
  cuda::WaitForPrevious();
  const int64_t end = Now() + nanoseconds;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < words;
       i += int64_t{gridDim.x} * kThreads) {
    out[blockIdx.y * words + i] = in[i];
  }
  cuda::LaunchDependents();
  WaitUntil(end);
}

cuda::Launch On(cudaStream_t stream) {
  cuda::Launch launch{};
  launch.stream = stream;
  return launch;
}

template <typename T>
cudaError_t Reduce(cudaStream_t stream, void* x, const void* others, int peers, int64_t count,
                   int64_t nanoseconds) {
  constexpr int kVector = 16 / sizeof(T);
  if (count % kVector != 0) return cudaErrorInvalidValue;
  const int64_t blocks = std::min<int64_t>(kMaxBlocks, (count / kVector + kThreads - 1) / kThreads);
  return cuda::LaunchAfter(On(stream), ReduceKernel<T>, dim3(static_cast<unsigned>(blocks)), kThreads, 0,
                           static_cast<T*>(x), static_cast<const T*>(others), peers, count, nanoseconds);
}

}  // namespace

cudaError_t StandInReduce(cudaStream_t stream, const kernels::Tensor& x, const void* others, int peers,
                          int64_t nanoseconds) {
  const int64_t count = x.rows * x.cols;
  if (x.dtype == kernels::DType::kBF16) {
    return Reduce<cuda::bf16>(stream, x.data, others, peers, count, nanoseconds);
  }
  return Reduce<float>(stream, x.data, others, peers, count, nanoseconds);
}

cudaError_t StandInGather(cudaStream_t stream, const void* in, size_t bytes, void* out, int peers,
                          int64_t nanoseconds) {
  if (bytes % 4 != 0) return cudaErrorInvalidValue;
  const auto words = static_cast<int64_t>(bytes / 4);
  const int64_t blocks = (words + kThreads - 1) / kThreads;
  return cuda::LaunchAfter(
      On(stream), GatherKernel,
      dim3(static_cast<unsigned>(std::min(blocks, kMaxBlocks)), static_cast<unsigned>(peers)), kThreads, 0,
      static_cast<const uint32_t*>(in), words, static_cast<uint32_t*>(out), nanoseconds);
}

}  // namespace kdt::bench
