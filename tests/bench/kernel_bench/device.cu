#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/types.cuh"
#include "tests/bench/kernel_bench/device.h"

namespace kdt::bench {
namespace {

__global__ void DelayKernel(int64_t nanoseconds) {
  int64_t start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}

__device__ uint32_t Hash(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

__global__ void FillNormalKernel(cuda::bf16* data, size_t values, uint32_t seed, float scale) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < values;
       i += size_t{gridDim.x} * blockDim.x) {
    const uint32_t a = Hash(static_cast<uint32_t>(i) * 2654435761u + seed), b = Hash(a + 0x9e3779b9u);
    const float u = (static_cast<float>(a >> 8) + 0.5f) * 0x1p-24f, v = static_cast<float>(b >> 8) * 0x1p-24f;
    data[i] = cuda::FromFloat<cuda::bf16>(sqrtf(-2.0f * logf(u)) * cospif(2.0f * v) * scale);
  }
}

__global__ void FillBitsKernel(uint32_t* data, size_t words, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < words;
       i += size_t{gridDim.x} * blockDim.x) {
    data[i] = Hash(static_cast<uint32_t>(i) * 2654435761u + seed);
  }
}

__global__ void __launch_bounds__(512) ReadKernel(const uint4* data, size_t count, float* sink) {
  uint32_t mix = 0;
  const size_t step = size_t{gridDim.x} * blockDim.x;
  size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x;
  for (; i + 7 * step < count; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = __ldcs(data + i + j * step);
#pragma unroll
    for (int j = 0; j < 8; ++j) mix ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (mix == 0x12345678u) *sink = 1.0f;
}

__global__ void __launch_bounds__(256) MmaKernel(int rounds, float* sink) {
  float acc[16][4] = {};
  const uint32_t a[4] = {threadIdx.x, threadIdx.x * 3, threadIdx.x * 5, threadIdx.x * 7};
  for (int r = 0; r < rounds; ++r) {
#pragma unroll
    for (int i = 0; i < 64; ++i) cuda::MmaBf16(acc[i % 16], a, a[i % 4], a[(i + 1) % 4]);
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) sum += acc[i][0] + acc[i][1] + acc[i][2] + acc[i][3];
  if (sum == 12345.0f) *sink = sum;
}

}  // namespace

void Delay(cudaStream_t stream, int64_t nanoseconds) { DelayKernel<<<1, 1, 0, stream>>>(nanoseconds); }
void FillNormal(cudaStream_t stream, void* data, size_t values, uint32_t seed, float scale) {
  FillNormalKernel<<<1024, 256, 0, stream>>>(static_cast<cuda::bf16*>(data), values, seed, scale);
}
void FillBits(cudaStream_t stream, void* data, size_t words, uint32_t seed) {
  FillBitsKernel<<<1024, 256, 0, stream>>>(static_cast<uint32_t*>(data), words, seed);
}
void ReadAll(cudaStream_t stream, const void* data, size_t bytes, float* sink) {
  ReadKernel<<<528, 512, 0, stream>>>(static_cast<const uint4*>(data), bytes / 16, sink);
}
double MmaAll(cudaStream_t stream, int processors, int rounds, float* sink) {
  MmaKernel<<<processors * 2, 256, 0, stream>>>(rounds, sink);
  return 2.0 * 16 * 8 * 16 * 64 * rounds * 8 * processors * 2;
}

}  // namespace kdt::bench
