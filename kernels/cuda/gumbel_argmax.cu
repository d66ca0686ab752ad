// One block a row. Built without contraction of products and sums (CMakeLists.txt): the noise and the choice
// are the CPU's, bit for bit.
#include "common/rng.h"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

__global__ void __launch_bounds__(1024)
    GumbelKernel(const float* logits, int64_t stride, int64_t vocab, int64_t vocab_begin,
                 const float* temperature, const uint64_t* seed, const int64_t* position, int32_t* id,
                 float* value, int32_t* bad) {
  __shared__ Best shared[32];
  LaunchDependents();
  WaitForPrevious();
  logits += blockIdx.x * stride;
  const float t = temperature[blockIdx.x];
  const bool noisy = t > 0.0f;
  const float inverse = noisy ? __fdiv_rn(1.0f, t) : 1.0f;
  const uint64_t key = seed[blockIdx.x], at = static_cast<uint64_t>(position[blockIdx.x]);
  const int64_t end = vocab_begin + vocab;
  Best best{-INFINITY, -1};
  bool finite = true;
  // Four tokens share one block of random words.
  for (int64_t group = vocab_begin / 4 + threadIdx.x; group * 4 < end; group += blockDim.x) {
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
  if (threadIdx.x == 0) {
    id[blockIdx.x] = best.index;
    value[blockIdx.x] = best.index < 0 ? -INFINITY : best.value;
    if (bad != nullptr) bad[blockIdx.x] = finite ? 0 : 1;
  }
}

}  // namespace

cudaError_t GumbelArgmax(const Launch& launch, const kernels::GumbelArgmaxArgs& args) {
  if (args.logits.rows == 0) return cudaSuccess;
  return LaunchAfter(launch, GumbelKernel, dim3(static_cast<unsigned>(args.logits.rows)), 1024, 0,
                     Data<float>(args.logits), args.logits.stride, args.logits.cols, args.vocab_begin,
                     args.temperature, args.seed, args.position, args.id, args.value, args.bad);
}

}  // namespace kdt::cuda
