// All-gather and broadcast by pulling, and the patterns that test whether the ranks reach each other's
// memory.
#include <algorithm>

#include "kernels/cuda/common/launch.cuh"
#include "worker/collective/cuda/ipc_meet.cuh"

namespace kdt::cuda {
namespace {

constexpr int kBatch = 8;  // ranks whose words are on their way at once

__device__ __forceinline__ void PublishWait(const IpcPeers& peers) {
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *static_cast<volatile unsigned long long*>(&peers.host->wait_ns) = peers.local->wait_ns;
  }
}

template <typename Word>
__global__ void __launch_bounds__(kIpcThreads, 1)
    GatherKernel(IpcPeers peers, const Word* in, int64_t words, Word* out, int64_t stride) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const IpcOp op = BeginOp(peers);
  Word* const mine = reinterpret_cast<Word*>(peers.blocks[peers.rank] + op.offset);
  for (int64_t i = first; i < words; i += step) mine[i] = in[i];
  const bool alive = Meet(peers, &IpcFlags::arrived, op.number);
  CountOp(peers, op.number);
  LaunchDependents();
  if (!alive) return;
  PublishWait(peers);
  for (int64_t i = first; i < words; i += step) {
    for (int base = 0; base < peers.size; base += kBatch) {
      Word values[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (base + k >= peers.size) break;
        values[k] = LoadPeer(reinterpret_cast<const Word*>(peers.blocks[base + k] + op.offset) + i);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (base + k >= peers.size) break;
        out[(base + k) * stride + i] = values[k];
      }
    }
  }
}

template <typename Word>
__global__ void __launch_bounds__(kIpcThreads, 1)
    BroadcastKernel(IpcPeers peers, Word* data, int64_t words, int root) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const IpcOp op = BeginOp(peers);
  Word* const shown = reinterpret_cast<Word*>(peers.blocks[root] + op.offset);
  if (peers.rank == root) {
    for (int64_t i = first; i < words; i += step) shown[i] = data[i];
  }
  const bool alive = Meet(peers, &IpcFlags::arrived, op.number);
  CountOp(peers, op.number);
  LaunchDependents();
  if (!alive) return;
  PublishWait(peers);
  if (peers.rank == root) return;
  for (int64_t i = first; i < words; i += step) data[i] = LoadPeer(shown + i);
}

__device__ __forceinline__ uint32_t Pattern(int i, int from, int to) {
  return (static_cast<uint32_t>(i) * 2654435761u) ^ static_cast<uint32_t>(from << 8 | to) ^ 0x5a000000u;
}

__global__ void FillKernel(uint32_t* at, int words, int from, int to) {
  for (int i = static_cast<int>(threadIdx.x); i < words; i += static_cast<int>(blockDim.x))
    at[i] = Pattern(i, from, to);
}

__global__ void CheckKernel(const uint32_t* at, int words, int from, int to, uint32_t* wrong) {
  for (int i = static_cast<int>(threadIdx.x); i < words; i += static_cast<int>(blockDim.x)) {
    if (LoadPeer(at + i) != Pattern(i, from, to)) atomicAdd(wrong, 1u);
  }
}

// Calls f with a null pointer of the widest word that bytes and addresses allow.
template <typename F>
cudaError_t ByWord(uint64_t bits, F f) {
  if (bits % 16 == 0) return f(static_cast<uint4*>(nullptr));
  if (bits % 4 == 0) return f(static_cast<uint32_t*>(nullptr));
  return f(static_cast<uint8_t*>(nullptr));
}

int WordBlocks(const IpcPeers& peers, int64_t words) {
  return static_cast<int>(std::clamp<int64_t>((words + kIpcThreads - 1) / kIpcThreads, 1, peers.max_blocks));
}

}  // namespace

cudaError_t IpcGather(const IpcPeers& peers, const void* in, size_t bytes, void* out, size_t stride,
                      cudaStream_t stream) {
  const uint64_t bits = reinterpret_cast<uint64_t>(in) | reinterpret_cast<uint64_t>(out) | bytes | stride;
  return ByWord(bits, [&](auto* t) {
    using Word = std::remove_pointer_t<decltype(t)>;
    const auto words = static_cast<int64_t>(bytes / sizeof(Word));
    return LaunchAfter(Launch{stream}, GatherKernel<Word>, WordBlocks(peers, words), kIpcThreads, 0, peers,
                       static_cast<const Word*>(in), words, static_cast<Word*>(out),
                       static_cast<int64_t>(stride / sizeof(Word)));
  });
}

cudaError_t IpcBroadcast(const IpcPeers& peers, void* data, size_t bytes, int root, cudaStream_t stream) {
  return ByWord(reinterpret_cast<uint64_t>(data) | bytes, [&](auto* t) {
    using Word = std::remove_pointer_t<decltype(t)>;
    const auto words = static_cast<int64_t>(bytes / sizeof(Word));
    return LaunchAfter(Launch{stream}, BroadcastKernel<Word>, WordBlocks(peers, words), kIpcThreads, 0, peers,
                       static_cast<Word*>(data), words, root);
  });
}

cudaError_t IpcFill(uint32_t* at, int words, int from, int to, cudaStream_t stream) {
  FillKernel<<<1, kIpcThreads, 0, stream>>>(at, words, from, to);
  return cudaGetLastError();
}

cudaError_t IpcCheck(const uint32_t* at, int words, int from, int to, uint32_t* wrong, cudaStream_t stream) {
  CheckKernel<<<1, kIpcThreads, 0, stream>>>(at, words, from, to, wrong);
  return cudaGetLastError();
}

}  // namespace kdt::cuda
