// One block a row. Every thread knows the best of its own values; the k-th best of those bounds the k-th best
// of the row from below, and few values lie above it: they are collected and ranked. Where they are too many
// (ties) the k-th best value is found by four passes of an 8-bit radix select over order-preserving keys, and
// the values above it and the first ones equal to it, by rising index, are collected instead.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kCandidates = 512;

// Larger float, larger key; both zeros have the same, NaN gets the smallest.
__device__ __forceinline__ uint32_t Key(float x) {
  if (x != x) return 0;
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

struct Selection {
  int histogram[256];
  int chosen, left, count, warp_count[32];
  float values[kCandidates];
  int ids[kCandidates];
};

// Exactly the k best, in any order.
__device__ void SelectByRadix(Selection& s, const float* logits, int vocab, int k) {
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  __syncthreads();
  if (thread == 0) {
    s.count = 0;
    s.left = k;
  }
  uint32_t prefix = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    if (thread < 256) s.histogram[thread] = 0;
    __syncthreads();
    for (int i = thread; i < vocab; i += kThreads) {
      const uint32_t key = Key(logits[i]);
      if (shift == 24 || key >> (shift + 8) == prefix) atomicAdd(&s.histogram[key >> shift & 255], 1);
    }
    __syncthreads();
    if (thread == 0) {
      int digit = 255, need = s.left;
      while (digit > 0 && s.histogram[digit] < need) need -= s.histogram[digit--];
      s.chosen = digit;
      s.left = need;  // how many with exactly this prefix are still wanted
    }
    __syncthreads();
    prefix = prefix << 8 | static_cast<uint32_t>(s.chosen);
  }
  // Everything above the threshold, in any order.
  for (int i = thread; i < vocab; i += kThreads) {
    if (Key(logits[i]) > prefix) {
      const int at = atomicAdd(&s.count, 1);
      s.values[at] = logits[i];
      s.ids[at] = i;
    }
  }
  __syncthreads();
  // Of those equal to it the first `left`, by index: a running count over the row.
  int equal_before = 0;
  const int above = s.count;
  for (int first = 0; first < vocab && equal_before < s.left; first += kThreads) {
    const int i = first + thread;
    const bool equal = i < vocab && Key(logits[i]) == prefix;
    const unsigned votes = __ballot_sync(~0u, equal);
    if (lane == 0) s.warp_count[warp] = __popc(votes);
    __syncthreads();
    int at = equal_before + __popc(votes & ((1u << lane) - 1));
    for (int j = 0; j < kThreads / 32; ++j) {
      if (j < warp) at += s.warp_count[j];
      equal_before += s.warp_count[j];
    }
    if (equal && at < s.left) {
      s.values[above + at] = logits[i];
      s.ids[above + at] = i;
    }
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kThreads) LogitsTopKKernel(kernels::LogitsTopKArgs args) {
  __shared__ float shared[32];
  __shared__ Selection s;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int vocab = static_cast<int>(args.logits.cols), k = static_cast<int>(args.k);
  const float* logits = static_cast<const float*>(args.logits.data) + blockIdx.x * args.logits.stride;

  LaunchDependents();
  WaitForPrevious();
  float top = -INFINITY;
  bool bad = false;
  uint32_t mine = 0;  // the best of this thread's
#pragma unroll 4
  for (int i = thread; i < vocab; i += kThreads) {
    const float v = logits[i];
    top = fmaxf(top, v);
    bad = bad || !(fabsf(v) <= 3.402823466e38f);
    mine = max(mine, Key(v));
  }
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  if (lane == 0) shared[warp] = top;
  bad = __syncthreads_or(bad);
  for (int i = 0; i < kThreads / 32; ++i) top = fmaxf(top, shared[i]);
  __syncthreads();
  float sum = 0.0f;
#pragma unroll 4
  for (int i = thread; i < vocab; i += kThreads) sum += expf(logits[i] - top);
  sum = BlockSum(sum, shared);
  if (thread == 0) {
    args.max[blockIdx.x] = top;
    args.sum_exp[blockIdx.x] = sum;
    args.bad[blockIdx.x] = bad ? 1 : 0;
    s.count = 0;
  }
  if (k == 0) return;

  // Bit by bit the largest key that the bests of k threads reach (0 with fewer threads that have values).
  uint32_t bound = 0;
  for (int bit = 31; bit >= 0; --bit) {
    const uint32_t higher = bound | 1u << bit;
    if (__syncthreads_count(mine >= higher) >= k) bound = higher;
  }
#pragma unroll 4
  for (int i = thread; i < vocab; i += kThreads) {
    const float v = logits[i];
    if (Key(v) < bound) continue;
    const int at = atomicAdd(&s.count, 1);
    if (at < kCandidates) s.values[at] = v, s.ids[at] = i;
  }
  __syncthreads();
  int found = s.count;
  if (found > kCandidates) {
    SelectByRadix(s, logits, vocab, k);
    found = k;
  }
  if (thread < found) {
    // Rank by value, then index; NaN (only when there are fewer than k numbers) goes last as "none".
    const float v = s.values[thread];
    const int id = s.ids[thread];
    const uint32_t mine_now = Key(v);
    int rank = 0;
    for (int j = 0; j < found; ++j) {
      const uint32_t other = Key(s.values[j]);
      rank += other > mine_now || (other == mine_now && s.ids[j] < id) ? 1 : 0;
    }
    if (rank < k) {
      const bool none = v != v;
      args.ids[blockIdx.x * args.k + rank] = none ? -1 : id + static_cast<int>(args.vocab_begin);
      args.values[blockIdx.x * args.k + rank] = none ? -INFINITY : v;
    }
  }
}

}  // namespace

cudaError_t LogitsTopK(const Launch& launch, const kernels::LogitsTopKArgs& args) {
  if (args.logits.rows == 0) return cudaSuccess;
  return LaunchAfter(launch, LogitsTopKKernel, dim3(static_cast<unsigned>(args.logits.rows)), kThreads, 0,
                     args);
}

}  // namespace kdt::cuda
