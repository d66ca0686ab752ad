// All-reduce by pulling. One-shot: every rank reads all values of all others. Two-shot: every rank sums its
// share of the values and then reads the others' shares: 2 (n - 1) / n of the bytes instead of n - 1 times,
// one meeting more.
#include <algorithm>

#include "kernels/cuda/common/launch.cuh"
#include "worker/collective/cuda/ipc_vector.cuh"

namespace kdt::cuda {
namespace {

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
