// Meeting of the ranks inside a kernel.
//
// Why one buffer for even and one for odd operations replaces a barrier at the end of an operation. Operation
// k copies into buffer k mod 2, and the others read it there until their operation k has finished. The next
// to write that buffer is operation k + 2 of its owner. It starts when the owner's operation k + 1 has
// finished, so behind a meeting of k + 1; every other rank came to that meeting with its kernel k + 1, which
// did so only behind griddepcontrol.wait, that is, when all blocks of its operation k had finished, and so
// all their reads. This holds whatever the two operations are and however many blocks each has (at least
// block 0 meets), also where a kernel has blocks beside that do not meet (ipc_reduce_gemm.cu). It needs that
// griddepcontrol.wait reaches back over every kernel in between, which rule 2 of launch.cuh gives.
//
// When the successor may start. A rank with a GPU of its own lets it start at once: it loads its weights
// while this operation waits. Where ranks share a GPU, the blocks of a successor that has started and waits
// could fill it and keep another rank's operation from starting, for which this one waits; so it starts
// behind the first meeting. There all ranks' blocks are on the GPU and need nobody who is not.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "worker/collective/cuda/ipc_kernels.h"

namespace kdt::cuda {

constexpr int kIpcThreads = 512;
// Looks at a flag between two looks at the host's abort word, which cost a microsecond each.
constexpr int kLooksPerAbortLook = 512;

__device__ __forceinline__ void StoreRelease(uint32_t* p, uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ uint32_t LoadAcquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// Of memory that another GPU or process writes: past L1.
__device__ __forceinline__ uint4 LoadPeer(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
__device__ __forceinline__ uint2 LoadPeer(const uint2* p) {
  uint2 v;
  asm volatile("ld.relaxed.sys.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
__device__ __forceinline__ uint32_t LoadPeer(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ uint8_t LoadPeer(const uint8_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u8 %0, [%1];" : "=r"(v) : "l"(p));
  return static_cast<uint8_t>(v);
}
__device__ __forceinline__ unsigned long long Nanos() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

struct IpcOp {
  uint32_t number;
  size_t offset;  // of the operation's buffer in every rank's block
};

__device__ __forceinline__ IpcFlags* FlagsOf(const IpcPeers& peers, int rank) {
  return reinterpret_cast<IpcFlags*>(peers.blocks[rank]);
}
__device__ __forceinline__ size_t BufferOf(const IpcPeers& peers, uint32_t number) {
  return kIpcFlagBytes + (number & 1) * peers.buffer_bytes;
}

// Of this block's next operation; behind WaitForPrevious().
__device__ __forceinline__ uint32_t NextNumber(const IpcPeers& peers) {
  return peers.local->ops[blockIdx.x] + 1;
}

// First in every kernel. What follows may not be moved in front of it.
__device__ __forceinline__ IpcOp BeginOp(const IpcPeers& peers) {
  if (peers.own_gpu) LaunchDependents();
  WaitForPrevious();
  const uint32_t number = NextNumber(peers);
  return {number, BufferOf(peers, number)};
}

using IpcFlagWords = uint32_t (IpcFlags::*)[kIpcMaxBlocks][kIpcMaxRanks];

__device__ __forceinline__ bool MeetsPeer(const IpcPeers& peers) {
  const int peer = static_cast<int>(threadIdx.x);
  return peer < peers.size && peer != peers.rank;
}

// Tells this block of every other rank that this one is here, with all that it wrote before. Returns when
// that was.
__device__ __forceinline__ unsigned long long Arrive(const IpcPeers& peers, IpcFlagWords flags,
                                                     uint32_t number) {
  __syncthreads();
  const unsigned long long start = Nanos();
  if (MeetsPeer(peers))
    StoreRelease(&(FlagsOf(peers, static_cast<int>(threadIdx.x))->*flags)[blockIdx.x][peers.rank], number);
  return start;
}

// Behind Arrive: waits until this block of every rank is here; what they wrote before is visible behind it.
// False: the group is dead, leave at once.
__device__ __forceinline__ bool Await(const IpcPeers& peers, IpcFlagWords flags, uint32_t number,
                                      unsigned long long start) {
  bool dead = false;
  if (MeetsPeer(peers)) {
    const uint32_t was_dead = peers.local->dead, late_ns = peers.local->late_ns;  // come with the flag
    const int peer = static_cast<int>(threadIdx.x);
    const uint32_t* flag = &(FlagsOf(peers, peers.rank)->*flags)[blockIdx.x][peer];
    // The difference, so that a number that has wrapped around does not matter. The other may be one ahead.
    for (int looks = 1; static_cast<int32_t>(LoadAcquire(flag) - number) < 0; ++looks) {
      dead = was_dead != 0;
      if (dead) break;
      if (looks % kLooksPerAbortLook != 0) continue;
      if (*static_cast<volatile const uint32_t*>(&peers.host->abort) == 0) continue;
      dead = true;
      *static_cast<volatile uint32_t*>(&peers.host->missing[peer]) = number;
      peers.local->dead = 1;
      break;
    }
    dead = dead || was_dead != 0;
    while (late_ns != 0 && Nanos() - start < late_ns) {
    }
  }
  dead = __syncthreads_or(dead) != 0;
  if (blockIdx.x == 0 && threadIdx.x == 0) peers.local->wait_ns += Nanos() - start;
  return !dead;
}

__device__ __forceinline__ bool Meet(const IpcPeers& peers, IpcFlagWords flags, uint32_t number) {
  return Await(peers, flags, number, Arrive(peers, flags, number));
}

// Of words that all blocks read and write as IpcLocal::ops says: those that fall to this one of `blocks`.
template <int kWords>
__device__ __forceinline__ void WriteOwn(uint32_t (&words)[kWords], unsigned blocks, uint32_t value) {
  const unsigned i = blockIdx.x + threadIdx.x * blocks;
  if (i < kWords) words[i] = value;
}

// Behind the first meeting: the block has read its number, and the next operation may have its own. `blocks`,
// the kernel's first ones, do the operation.
__device__ __forceinline__ void CountOp(const IpcPeers& peers, uint32_t number, unsigned blocks = gridDim.x) {
  WriteOwn(peers.local->ops, blocks, number);
}

}  // namespace kdt::cuda
