// Eight values at a time: 16 bytes of bf16 or 32 of float32, from and to 16-byte aligned addresses.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/types.cuh"

namespace kdt::cuda {

__device__ __forceinline__ void Unpack8(float (&v)[8], const uint4& bits) {
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[2 * i] = LowBf16(words[i]);
    v[2 * i + 1] = HighBf16(words[i]);
  }
}
__device__ __forceinline__ void Load8(float (&v)[8], const bf16* from) {
  Unpack8(v, *reinterpret_cast<const uint4*>(from));
}
__device__ __forceinline__ void Load8(float (&v)[8], const float* from) {
  const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
__device__ __forceinline__ void Store8(bf16* to, const float (&v)[8]) {
  *reinterpret_cast<uint4*>(to) = {PackBf16(v[0], v[1]), PackBf16(v[2], v[3]), PackBf16(v[4], v[5]),
                                   PackBf16(v[6], v[7])};
}
__device__ __forceinline__ void Store8(float* to, const float (&v)[8]) {
  reinterpret_cast<float4*>(to)[0] = {v[0], v[1], v[2], v[3]};
  reinterpret_cast<float4*>(to)[1] = {v[4], v[5], v[6], v[7]};
}
__device__ __forceinline__ float Squares8(const float (&v)[8]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(v[i], v[i], sum);
  return sum;
}
// weight * (v * factor), with the product in brackets rounded to the activations' type T as the models' code
// does.
template <typename T>
__device__ __forceinline__ void Scale8(float (&v)[8], float factor, const uint4& weight) {
  float w[8];
  Unpack8(w, weight);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = w[i] * Rounded<T>(v[i] * factor);
}

// Whether every row of a tensor, taken eight values at a time, is aligned.
inline bool InChunks(const kernels::Tensor& t) {
  return t.cols % 8 == 0 && t.stride % 8 == 0 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

}  // namespace kdt::cuda
