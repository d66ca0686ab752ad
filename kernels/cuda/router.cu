// Scores by the skinny gemm (or a plain dot product for float32 weights), then one block a row chooses.
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxRouted = 4096;

template <typename T>
__global__ void ScoreKernel(const T* x, int64_t x_stride, const float* w, int64_t w_stride, int64_t inputs,
                            int experts, float* scores) {
  const int expert = blockIdx.y * (blockDim.x / 32) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (expert >= experts) return;
  float sum = 0.0f;
  for (int64_t i = lane; i < inputs; i += 32)
    sum = fmaf(ToFloat(x[blockIdx.x * x_stride + i]), w[expert * w_stride + i], sum);
  sum = WarpSum(sum);
  if (lane == 0) scores[static_cast<int64_t>(blockIdx.x) * experts + expert] = sum;
}

__global__ void __launch_bounds__(kThreads)
    ChooseKernel(const float* scores, const float* bias, int experts, int top_k, bool normalize, float scale,
                 const int32_t* row_count, int32_t* ids, float* weights) {
  if (row_count != nullptr && static_cast<int>(blockIdx.x) >= *row_count) {  // padding
    if (threadIdx.x < top_k) {
      ids[static_cast<int64_t>(blockIdx.x) * top_k + threadIdx.x] = -1;
      weights[static_cast<int64_t>(blockIdx.x) * top_k + threadIdx.x] = 0.0f;
    }
    return;
  }
  __shared__ Best shared[kThreads / 32];
  __shared__ float biased[kMaxRouted], plain[kMaxRouted];
  __shared__ int chosen[kernels::kMaxExpertsPerToken];
  scores += static_cast<int64_t>(blockIdx.x) * experts;
  for (int e = threadIdx.x; e < experts; e += kThreads) {
    const float s = 1.0f / (1.0f + expf(-scores[e]));
    plain[e] = s;
    const float b = s + bias[e];
    biased[e] = b == b ? b : -INFINITY;  // NaN (from a broken row) loses, but some expert must be named
  }
  __syncthreads();
  for (int k = 0; k < top_k; ++k) {
    Best best{0.0f, -1};
    for (int e = threadIdx.x; e < experts; e += kThreads) {
      bool taken = false;
      for (int j = 0; j < k; ++j) taken = taken || chosen[j] == e;
      if (!taken) best = Better(best, {biased[e], e});
    }
    best = BlockBest(best, shared);
    if (threadIdx.x == 0) chosen[k] = best.index;
    __syncthreads();
  }
  if (threadIdx.x < top_k) {
    const int mine = chosen[threadIdx.x];
    int rank = 0;
    float sum = 0.0f;
    // Summed by rising expert, as the CPU does.
    int previous = -1;
    for (int j = 0; j < top_k; ++j) {
      int next = experts;
      for (int i = 0; i < top_k; ++i) {
        if (chosen[i] > previous && chosen[i] < next) next = chosen[i];
      }
      sum += plain[next];
      if (next == mine) rank = j;
      previous = next;
    }
    const float factor = normalize ? scale / (sum + 1e-20f) : scale;
    ids[static_cast<int64_t>(blockIdx.x) * top_k + rank] = mine;
    weights[static_cast<int64_t>(blockIdx.x) * top_k + rank] = plain[mine] * factor;
  }
}

}  // namespace

cudaError_t Router(const Launch& launch, const kernels::RouterArgs& args) {
  const int64_t rows = args.x.rows, experts = args.w.rows;
  if (rows == 0) return cudaSuccess;
  const size_t bytes = (static_cast<size_t>(rows * experts) * sizeof(float) + 255) / 256 * 256;
  if (experts > kMaxRouted || args.top_k > kernels::kMaxExpertsPerToken || args.top_k > experts ||
      bytes > launch.workspace_bytes) {
    return cudaErrorInvalidValue;
  }
  // The scores take the end of the workspace, the gemm may use the rest.
  Launch rest = launch;
  rest.workspace_bytes = (launch.workspace_bytes - bytes) / 256 * 256;
  float* const scores = reinterpret_cast<float*>(static_cast<char*>(launch.workspace) + rest.workspace_bytes);
  if (args.w.dtype == kernels::DType::kBF16) {
    kernels::GemmArgs gemm;
    gemm.x = args.x;
    gemm.w = args.w;
    gemm.y = kernels::MakeTensor(scores, kernels::DType::kF32, rows, experts);
    if (const cudaError_t error = Gemm(rest, gemm); error != cudaSuccess) return error;
  } else {
    ByType(args.x.dtype, [&](auto* t) {
      using T = std::remove_pointer_t<decltype(t)>;
      ScoreKernel<T><<<dim3(static_cast<int>(rows), Blocks(experts, 8)), 256, 0, launch.stream>>>(
          Data<T>(args.x), args.x.stride, Data<float>(args.w), args.w.stride, args.x.cols,
          static_cast<int>(experts), scores);
    });
  }
  ChooseKernel<<<static_cast<int>(rows), kThreads, 0, launch.stream>>>(
      scores, args.bias, static_cast<int>(experts), static_cast<int>(args.top_k), args.normalize, args.scale,
      args.row_count, args.expert_ids, args.weights);
  return cudaGetLastError();
}

}  // namespace kdt::cuda
