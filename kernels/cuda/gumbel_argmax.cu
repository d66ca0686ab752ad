// The vocabulary of a row is shared by a few blocks, the last of which compares what they found. Built
// without contraction of products and sums (CMakeLists.txt): the noise and the choice are the CPU's, bit for
// bit.
#include "common/rng.h"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kManyRows = 512;  // from here on a block a row fills the chip
constexpr int kParts = 20;          // blocks a row below: of 20480 tokens a thread has four
static_assert(kParts <= 32);

struct Found {
  Best best;
  int finite;
};

__global__ void __launch_bounds__(kThreads)
    GumbelKernel(const __grid_constant__ kernels::GumbelArgmaxArgs args, Found* found, unsigned* counters) {
  __shared__ Best shared[32];
  __shared__ bool last;
  LaunchDependents();
  WaitForPrevious();
  const float* logits = static_cast<const float*>(args.logits.data) + blockIdx.x * args.logits.stride;
  const int64_t vocab = args.logits.cols, vocab_begin = args.vocab_begin;
  const float t = args.temperature[blockIdx.x];
  const bool noisy = t > 0.0f;
  const float inverse = noisy ? __fdiv_rn(1.0f, t) : 1.0f;
  const uint64_t key = args.seed[blockIdx.x], at = static_cast<uint64_t>(args.position[blockIdx.x]);
  const int64_t end = vocab_begin + vocab;
  Best best{-INFINITY, -1};
  bool finite = true;
  // Four tokens share one block of random words.
  for (int64_t group = vocab_begin / 4 + blockIdx.y * kThreads + threadIdx.x; group * 4 < end;
       group += gridDim.y * kThreads) {
    PhiloxBlock words{};
    if (noisy) words = NoiseWords(key, at, static_cast<uint32_t>(group));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t token = group * 4 + j;
      if (token < vocab_begin || token >= end) continue;
      float v = logits[token - vocab_begin];
      finite = finite && fabsf(v) <= 3.402823466e38f;
      if (noisy) v = __fadd_rn(__fmul_rn(v, inverse), GumbelFromWord(words.word[j]));
      if (v > best.value) best = {v, static_cast<int>(token)};  // false for NaN and for masked tokens
    }
  }
  best = BlockBest(best, shared);
  finite = __syncthreads_and(finite);
  if (gridDim.y > 1) {
    Found* const mine = found + blockIdx.x * gridDim.y;
    if (threadIdx.x == 0) {
      mine[blockIdx.y] = {best, finite ? 1 : 0};
      __threadfence();
      last = atomicAdd(counters + blockIdx.x, 1u) == gridDim.y - 1;
      if (last) counters[blockIdx.x] = 0;
      __threadfence();
    }
    __syncthreads();
    if (!last || threadIdx.x >= 32) return;
    Found other{{0.0f, -1}, 1};
    if (threadIdx.x < gridDim.y) {
      const volatile Found& from = mine[threadIdx.x];
      other = {{from.best.value, from.best.index}, from.finite};
    }
    best = other.best;
#pragma unroll
    for (int d = 16; d > 0; d >>= 1)
      best = Better(best, {__shfl_xor_sync(~0u, best.value, d), __shfl_xor_sync(~0u, best.index, d)});
    finite = __all_sync(~0u, other.finite != 0);
  }
  if (threadIdx.x != 0) return;
  args.id[blockIdx.x] = best.index;
  args.value[blockIdx.x] = best.index < 0 ? -INFINITY : best.value;
  if (args.bad != nullptr) args.bad[blockIdx.x] = finite ? 0 : 1;
}

}  // namespace

cudaError_t GumbelArgmax(const Launch& launch, const kernels::GumbelArgmaxArgs& args) {
  if (args.logits.rows == 0) return cudaSuccess;
  const int parts = args.logits.rows < kManyRows ? kParts : 1;
  static_assert(kManyRows <= kCounters);
  if (args.logits.rows * parts * sizeof(Found) > launch.workspace_bytes) return cudaErrorInvalidValue;
  return LaunchAfter(launch, GumbelKernel, dim3(static_cast<unsigned>(args.logits.rows), parts), kThreads, 0,
                     args, static_cast<Found*>(launch.workspace), launch.counters);
}

}  // namespace kdt::cuda
