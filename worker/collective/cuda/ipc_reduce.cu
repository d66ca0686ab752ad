// All-reduce by pulling. One-shot: every rank reads all values of all others. Two-shot: every rank sums its
// share of the values and then reads the others' shares: 2 (n - 1) / n of the bytes instead of n - 1 times,
// one meeting more.
#include <algorithm>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/types.cuh"
#include "worker/collective/cuda/ipc_meet.cuh"

namespace kdt::cuda {
namespace {

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

template <typename T>
__global__ void __launch_bounds__(kIpcThreads, 1) OneShotKernel(IpcPeers peers, T* x, int64_t count) {
  const int64_t vectors = (count + kPerVector<T> - 1) / kPerVector<T>;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const IpcOp op = BeginOp(peers);
  uint4* const mine = reinterpret_cast<uint4*>(peers.blocks[peers.rank] + op.offset);
  for (int64_t i = first; i < vectors; i += step) mine[i] = LoadVector(x, i, count);
  const bool alive = Meet(peers, &IpcFlags::arrived, op.number);
  CountOp(peers, op.number);
  LaunchDependents();
  if (!alive) return;
  for (int64_t i = first; i < vectors; i += step) {
    StoreVector(x, i, count, SumVector(peers, op.offset, x, i, count));
  }
}

// Block b works on part b of every rank's share, in all three phases: so it needs only its own kind's
// meetings. A rank's sums go to its own share of its buffer, which no other rank reads before the second
// meeting.
template <typename T>
__global__ void __launch_bounds__(kIpcThreads, 1) TwoShotKernel(IpcPeers peers, T* x, int64_t count) {
  const int64_t vectors = (count + kPerVector<T> - 1) / kPerVector<T>;
  const int64_t share = (vectors + peers.size - 1) / peers.size;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const IpcOp op = BeginOp(peers);
  uint4* const mine = reinterpret_cast<uint4*>(peers.blocks[peers.rank] + op.offset);
  for (int64_t j = first; j < share; j += step) {
    for (int rank = 0; rank < peers.size; ++rank) {
      const int64_t i = rank * share + j;
      if (rank != peers.rank && i < vectors) mine[i] = LoadVector(x, i, count);
    }
  }
  bool alive = Meet(peers, &IpcFlags::arrived, op.number);
  CountOp(peers, op.number);
  LaunchDependents();
  if (!alive) return;
  for (int64_t j = first; j < share; j += step) {
    const int64_t i = peers.rank * share + j;
    if (i >= vectors) break;
    const uint4 sum = SumVector(peers, op.offset, x, i, count);
    mine[i] = sum;
    StoreVector(x, i, count, sum);
  }
  if (!Meet(peers, &IpcFlags::reduced, op.number)) return;
  for (int64_t j = first; j < share; j += step) {
    for (int base = 0; base < peers.size; base += kBatch) {
      uint4 sums[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int rank = base + k;
        const int64_t i = rank * share + j;
        if (rank >= peers.size || rank == peers.rank || i >= vectors) continue;
        sums[k] = LoadPeer(reinterpret_cast<const uint4*>(peers.blocks[rank] + op.offset) + i);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int rank = base + k;
        const int64_t i = rank * share + j;
        if (rank >= peers.size || rank == peers.rank || i >= vectors) continue;
        StoreVector(x, i, count, sums[k]);
      }
    }
  }
}

template <typename T>
int VectorBlocks(const IpcPeers& peers, int64_t count, int64_t shares) {
  const int64_t vectors = (count + kPerVector<T> - 1) / kPerVector<T>;
  const int64_t blocks = ((vectors + shares - 1) / shares + kIpcThreads - 1) / kIpcThreads;
  return static_cast<int>(std::clamp<int64_t>(blocks, 1, peers.max_blocks));
}

}  // namespace

cudaError_t IpcReduceOneShot(const IpcPeers& peers, void* x, kernels::DType type, int64_t count,
                             cudaStream_t stream) {
  return ByType(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    return LaunchAfter(Launch{stream}, OneShotKernel<T>, VectorBlocks<T>(peers, count, 1), kIpcThreads, 0,
                       peers, static_cast<T*>(x), count);
  });
}

cudaError_t IpcReduceTwoShot(const IpcPeers& peers, void* x, kernels::DType type, int64_t count,
                             cudaStream_t stream) {
  return ByType(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    return LaunchAfter(Launch{stream}, TwoShotKernel<T>, VectorBlocks<T>(peers, count, peers.size),
                       kIpcThreads, 0, peers, static_cast<T*>(x), count);
  });
}

}  // namespace kdt::cuda
