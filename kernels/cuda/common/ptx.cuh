// The few PTX instructions the kernels are written in. All of them exist on sm_90 and on sm_120 without arch
// suffix.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace kdt::cuda {

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// threadIdx.x % 32, read at every use instead of kept in a register.
__device__ __forceinline__ uint32_t LaneIndex() {
  uint32_t lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// blockIdx.x, the same.
__device__ __forceinline__ uint32_t BlockIndex() {
  uint32_t block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}

// Keeps a value in a register where the compiler would compute it again at every use.
__device__ __forceinline__ uint32_t Pinned(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// 16 bytes from global to shared memory, past L1.
__device__ __forceinline__ void CopyAsync16(uint32_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
// The same, or 16 zeros.
__device__ __forceinline__ void CopyAsync16Or0(uint32_t dst, const void* src, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "r"(there ? 16 : 0)
               : "memory");
}
// Both through L1.
__device__ __forceinline__ void CopyAsync16Cached(uint32_t dst, const void* src) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
__device__ __forceinline__ void CopyAsync16CachedOr0(uint32_t dst, const void* src, bool there) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "r"(there ? 16 : 0)
               : "memory");
}
// The line of 128 bytes into L2.
__device__ __forceinline__ void PrefetchL2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}
// 16 bytes of constants that are read once, past L1.
__device__ __forceinline__ uint4 LoadStreamed(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
// Goes on when a value that is being loaded has come.
__device__ __forceinline__ void WaitForLoad(uint32_t loaded) {
  asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0x7f83a5c1; @p nanosleep.u32 1; }" ::"r"(loaded)
               : "memory");
}
// The barrier counts one arrival of this thread when all its copies so far have landed.
__device__ __forceinline__ void CopyAsyncArrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
// The copies of this thread since the last such call are a group; wait until at most kPending groups are
// under way.
__device__ __forceinline__ void CopyAsyncCommit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void CopyAsyncWaitGroups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
// `bytes` (a multiple of 16, aligned to 16) from global to shared memory; the barrier is told of them as they
// land.
__device__ __forceinline__ void CopyBulk(uint32_t dst, const void* src, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(barrier)
      : "memory");
}
// One arrival, and so many bytes to wait for.
__device__ __forceinline__ void BarrierExpect(uint32_t barrier, int bytes) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// What this thread did with shared memory comes before bulk copies that are ordered behind it.
__device__ __forceinline__ void FenceBulk() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// All copies of this thread have landed.
__device__ __forceinline__ void CopyAsyncWait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void BarrierInit(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void BarrierArrive(uint32_t barrier) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void BarrierWait(uint32_t barrier, int parity) {
  asm volatile(
      "{ .reg .pred p;\n"
      "WAIT: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
      "@p bra DONE;\n"
      "bra WAIT;\n"
      "DONE: }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Barrier `id` (1..15) among `threads` threads of the block.
__device__ __forceinline__ void NamedBarrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Comes to it and does not wait.
__device__ __forceinline__ void NamedArrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same, returning whether any thread came with `value`.
__device__ __forceinline__ bool NamedBarrierOr(int id, int threads, bool value) {
  int any;
  asm volatile(
      "{ .reg .pred p, q;\n"
      "setp.ne.s32 p, %3, 0;\n"
      "barrier.cta.red.or.pred.aligned q, %1, %2, p;\n"
      "selp.s32 %0, 1, 0, q; }"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<int>(value))
      : "memory");
  return any != 0;
}

__device__ __forceinline__ void LoadMatrix4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void LoadMatrix4Transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
// d += a b, m16n8k16, bf16 in, float32 out.
__device__ __forceinline__ void MmaBf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void StoreShared4(uint32_t address, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}
__device__ __forceinline__ void StoreShared4U(uint32_t address, const uint4& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void StoreShared(uint32_t address, float a) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(a) : "memory");
}
__device__ __forceinline__ float4 LoadShared4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ uint4 LoadShared4U(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ void StoreShared2(uint32_t address, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}
__device__ __forceinline__ float2 LoadShared2(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ float LoadShared(uint32_t address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ uint32_t PackHalf(float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float2 HalfPair(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
// Products of two pairs of bf16, rounded to bf16.
__device__ __forceinline__ uint32_t MulBf16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ float LowBf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float HighBf16(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// What other blocks of the device wrote before they released this counter is seen behind it.
__device__ __forceinline__ unsigned LoadAcquireDevice(const unsigned* from) {
  unsigned v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

__device__ __forceinline__ unsigned LoadRelaxedDevice(const unsigned* from) {
  unsigned v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

// Programmatic dependent launch: the next kernel may start its blocks; wait until the one before has
// finished.
__device__ __forceinline__ void LaunchDependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void WaitForPrevious() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace kdt::cuda
