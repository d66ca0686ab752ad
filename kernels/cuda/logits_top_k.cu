// One block a row. The k-th best value is found by four passes of an 8-bit radix select over order-preserving
// keys; then the values above it and the first ones equal to it, by rising index, are collected and ranked.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 1024;

// Larger float, larger key; both zeros have the same, NaN gets the smallest.
__device__ __forceinline__ uint32_t Key(float x) {
  if (x != x) return 0;
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

__global__ void __launch_bounds__(kThreads) LogitsTopKKernel(kernels::LogitsTopKArgs args) {
  __shared__ float shared[32];
  __shared__ int histogram[256];
  __shared__ int chosen, left, count, warp_count[32];
  __shared__ float values[kernels::kMaxTopK];
  __shared__ int ids[kernels::kMaxTopK];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int vocab = static_cast<int>(args.logits.cols), k = static_cast<int>(args.k);
  const float* logits = static_cast<const float*>(args.logits.data) + blockIdx.x * args.logits.stride;

  LaunchDependents();
  WaitForPrevious();
  float top = -INFINITY;
  bool bad = false;
  for (int i = thread; i < vocab; i += kThreads) {
    top = fmaxf(top, logits[i]);
    bad = bad || !(fabsf(logits[i]) <= 3.402823466e38f);
  }
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  if (lane == 0) shared[warp] = top;
  bad = __syncthreads_or(bad);
  for (int i = 0; i < kThreads / 32; ++i) top = fmaxf(top, shared[i]);
  __syncthreads();
  float sum = 0.0f;
  for (int i = thread; i < vocab; i += kThreads) sum += expf(logits[i] - top);
  sum = BlockSum(sum, shared);
  if (thread == 0) {
    args.max[blockIdx.x] = top;
    args.sum_exp[blockIdx.x] = sum;
    args.bad[blockIdx.x] = bad ? 1 : 0;
    count = 0;
    left = k;
  }
  if (k == 0) return;

  uint32_t prefix = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    if (thread < 256) histogram[thread] = 0;
    __syncthreads();
    for (int i = thread; i < vocab; i += kThreads) {
      const uint32_t key = Key(logits[i]);
      if (shift == 24 || key >> (shift + 8) == prefix) atomicAdd(&histogram[key >> shift & 255], 1);
    }
    __syncthreads();
    if (thread == 0) {
      int digit = 255, need = left;
      while (digit > 0 && histogram[digit] < need) need -= histogram[digit--];
      chosen = digit;
      left = need;  // how many with exactly this prefix are still wanted
    }
    __syncthreads();
    prefix = prefix << 8 | static_cast<uint32_t>(chosen);
  }
  // Everything above the threshold, in any order.
  for (int i = thread; i < vocab; i += kThreads) {
    if (Key(logits[i]) > prefix) {
      const int at = atomicAdd(&count, 1);
      values[at] = logits[i];
      ids[at] = i;
    }
  }
  __syncthreads();
  // Of those equal to it the first `left`, by index: a running count over the row.
  int equal_before = 0;
  const int above = count;
  for (int first = 0; first < vocab && equal_before < left; first += kThreads) {
    const int i = first + thread;
    const bool equal = i < vocab && Key(logits[i]) == prefix;
    const unsigned votes = __ballot_sync(~0u, equal);
    if (lane == 0) warp_count[warp] = __popc(votes);
    __syncthreads();
    int at = equal_before + __popc(votes & ((1u << lane) - 1));
    for (int j = 0; j < kThreads / 32; ++j) {
      if (j < warp) at += warp_count[j];
      equal_before += warp_count[j];
    }
    if (equal && at < left) {
      values[above + at] = logits[i];
      ids[above + at] = i;
    }
    __syncthreads();
  }
  if (thread < k) {
    // Rank by value, then index; NaN (only when there are fewer than k numbers) goes last as "none".
    const float v = values[thread];
    const int id = ids[thread];
    int rank = 0;
    for (int j = 0; j < k; ++j) {
      const uint32_t other = Key(values[j]), mine = Key(v);
      rank += other > mine || (other == mine && ids[j] < id) ? 1 : 0;
    }
    const bool none = v != v;
    args.ids[blockIdx.x * args.k + rank] = none ? -1 : id + static_cast<int>(args.vocab_begin);
    args.values[blockIdx.x * args.k + rank] = none ? -INFINITY : v;
  }
}

}  // namespace

cudaError_t LogitsTopK(const Launch& launch, const kernels::LogitsTopKArgs& args) {
  if (args.logits.rows == 0) return cudaSuccess;
  return LaunchAfter(launch, LogitsTopKKernel, dim3(static_cast<unsigned>(args.logits.rows)), kThreads, 0,
                     args);
}

}  // namespace kdt::cuda
