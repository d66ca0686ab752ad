// Values of a reduction sixteen bytes at a time, and their sum over the ranks.
#pragma once

#include "kernels/cuda/common/types.cuh"
#include "worker/collective/cuda/ipc_meet.cuh"

namespace kdt::cuda {

constexpr int kBatch = 8;  // ranks whose values are on their way at once

template <typename T>
constexpr int kPerVector = static_cast<int>(sizeof(uint4) / sizeof(T));

// Vector i of `count` values at x; the last one may be cut.
template <typename T>
__device__ __forceinline__ uint4 LoadVector(const T* x, int64_t i, int64_t count) {
  if ((i + 1) * kPerVector<T> <= count) return reinterpret_cast<const uint4*>(x)[i];
  union {
    uint4 vector;
    T values[kPerVector<T>];
  } v{};
#pragma unroll
  for (int k = 0; k < kPerVector<T>; ++k) {
    if (i * kPerVector<T> + k < count) v.values[k] = x[i * kPerVector<T> + k];
  }
  return v.vector;
}
template <typename T>
__device__ __forceinline__ void StoreVector(T* x, int64_t i, int64_t count, const uint4& vector) {
  if ((i + 1) * kPerVector<T> <= count) {
    reinterpret_cast<uint4*>(x)[i] = vector;
    return;
  }
  const T* values = reinterpret_cast<const T*>(&vector);
#pragma unroll
  for (int k = 0; k < kPerVector<T>; ++k) {
    if (i * kPerVector<T> + k < count) x[i * kPerVector<T> + k] = values[k];
  }
}

__device__ __forceinline__ void Unpack(const uint4& v, float (&out)[4], const float*) {
  out[0] = __uint_as_float(v.x);
  out[1] = __uint_as_float(v.y);
  out[2] = __uint_as_float(v.z);
  out[3] = __uint_as_float(v.w);
}
__device__ __forceinline__ void Unpack(const uint4& v, float (&out)[8], const bf16*) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    out[2 * k] = LowBf16(words[k]);
    out[2 * k + 1] = HighBf16(words[k]);
  }
}
__device__ __forceinline__ uint4 Pack(const float (&v)[4]) {
  return {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])};
}
__device__ __forceinline__ uint4 Pack(const float (&v)[8]) {
  return {PackBf16(v[0], v[1]), PackBf16(v[2], v[3]), PackBf16(v[4], v[5]), PackBf16(v[6], v[7])};
}

// Vector i summed over the ranks, in rank order from rank 0's value on; this rank's comes from x.
template <typename T>
__device__ __forceinline__ uint4 SumVector(const IpcPeers& peers, size_t offset, const T* x, int64_t i,
                                           int64_t count) {
  float sums[kPerVector<T>];
  for (int base = 0; base < peers.size; base += kBatch) {
    uint4 vectors[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int rank = base + k;
      if (rank >= peers.size) break;
      vectors[k] = rank == peers.rank
                       ? LoadVector(x, i, count)
                       : LoadPeer(reinterpret_cast<const uint4*>(peers.blocks[rank] + offset) + i);
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (base + k >= peers.size) break;
      float values[kPerVector<T>];
      Unpack(vectors[k], values, x);
#pragma unroll
      for (int j = 0; j < kPerVector<T>; ++j) sums[j] = base + k == 0 ? values[j] : sums[j] + values[j];
    }
  }
  return Pack(sums);
}

// What IpcTakesNorm takes, as kernels see it.
struct NormRows {
  const bf16* x;  // [rows, n], contiguous
  bf16* residual;
  int64_t residual_stride;
  const bf16* weight;
  float eps;
  int rows;
  int n;
  bf16* out;
  int64_t out_stride;
};
inline NormRows MakeNormRows(const kernels::RmsNormArgs& norm) {
  return {Data<bf16>(norm.x),
          Data<bf16>(norm.residual),
          norm.residual.stride,
          reinterpret_cast<const bf16*>(norm.weight),
          norm.eps,
          static_cast<int>(norm.x.rows),
          static_cast<int>(norm.x.cols),
          Data<bf16>(norm.out),
          norm.out.stride};
}

}  // namespace kdt::cuda
