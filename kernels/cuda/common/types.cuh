// Element types of tensors in device code, and dispatch on a Tensor's dtype.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kdt/kernels/tensor.h"

namespace kdt::cuda {

using bf16 = __nv_bfloat16;

__device__ __forceinline__ float ToFloat(float x) { return x; }
__device__ __forceinline__ float ToFloat(bf16 x) { return __bfloat162float(x); }
template <typename T>
__device__ __forceinline__ T FromFloat(float x);
template <>
__device__ __forceinline__ float FromFloat<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bf16 FromFloat<bf16>(float x) {
  return __float2bfloat16_rn(x);
}
// Rounds to T and back.
template <typename T>
__device__ __forceinline__ float Rounded(float x) {
  return ToFloat(FromFloat<T>(x));
}

// x / (1 + e^-x), by the approximate instructions: a few float32 steps off, and short.
__device__ __forceinline__ float Silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// Calls f with a null pointer of the element type.
template <typename F>
auto ByType(kernels::DType type, F f) {
  return type == kernels::DType::kF32 ? f(static_cast<float*>(nullptr)) : f(static_cast<bf16*>(nullptr));
}

template <typename T>
T* Data(const kernels::Tensor& t) {
  return static_cast<T*>(t.data);
}

inline int Blocks(int64_t count, int64_t per_block) {
  return static_cast<int>((count + per_block - 1) / per_block);
}

// Sum, and maximum with the lower index first among equals, over a block of at most 1024 threads. `shared`
// holds 32 values.
__device__ __forceinline__ float WarpSum(float x) {
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
  return x;
}
__device__ __forceinline__ float BlockSum(float x, float* shared) {
  x = WarpSum(x);
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = x;
  __syncthreads();
  const int warps = (blockDim.x + 31) >> 5;
  float sum = (threadIdx.x & 31) < warps ? shared[threadIdx.x & 31] : 0.0f;
  sum = WarpSum(sum);
  __syncthreads();
  return sum;
}

struct Best {
  float value;
  int index;  // negative: none
};
__device__ __forceinline__ Best Better(Best a, Best b) {
  const bool take_b =
      b.index >= 0 && (a.index < 0 || b.value > a.value || (b.value == a.value && b.index < a.index));
  return take_b ? b : a;
}
__device__ __forceinline__ Best BlockBest(Best x, Best* shared) {
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) {
    x = Better(x, {__shfl_xor_sync(~0u, x.value, d), __shfl_xor_sync(~0u, x.index, d)});
  }
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = x;
  __syncthreads();
  const int warps = (blockDim.x + 31) >> 5;
  Best best{0.0f, -1};
  for (int i = 0; i < warps; ++i) best = Better(best, shared[i]);
  __syncthreads();
  return best;
}

}  // namespace kdt::cuda
