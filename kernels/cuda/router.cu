// Scores and, beside them, the shared experts' gate and up with their activation, which read the same rows;
// then the shared experts' down product, and beside it, in blocks of its own, the choice of the experts.
// Without shared experts the choice is a launch by itself. Many rows, float32 weights and unusual shapes go
// one after the other. The engine leaves the second part to moe (moe/choose.cuh).
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/gemm/choose.cuh"
#include "kernels/cuda/gemm/skinny.h"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

constexpr int kMaxRouted = 1024;

template <typename T>
__global__ void ScoreKernel(const T* x, int64_t x_stride, const float* w, int64_t w_stride, int64_t inputs,
                            int experts, float* scores) {
  LaunchDependents();
  WaitForPrevious();
  const int expert = blockIdx.y * (blockDim.x / 32) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (expert >= experts) return;
  float sum = 0.0f;
  for (int64_t i = lane; i < inputs; i += 32)
    sum = fmaf(ToFloat(x[blockIdx.x * x_stride + i]), w[expert * w_stride + i], sum);
  sum = WarpSum(sum);
  if (lane == 0) scores[static_cast<int64_t>(blockIdx.x) * experts + expert] = sum;
}

template <int kPerLane>
__global__ void __launch_bounds__(kChoiceThreads) ChooseKernel(const __grid_constant__ ChoiceParams p) {
  __shared__ ChoiceRoom<kPerLane> room;
  LaunchDependents();
  ChooseRow(p, blockIdx.x, room);
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
  const int64_t inner = args.shared_down.cols;
  if (args.shared_gate_up.rows > 0 &&
      (args.shared_gate_up.rows != 2 * inner || args.shared_inner.cols < 2 * inner ||
       args.shared_inner.rows < rows || args.shared_y.cols < args.shared_down.rows)) {
    return cudaErrorInvalidValue;
  }
  // The scores take the end of the workspace, the gemm may use the rest.
  Launch rest = launch;
  rest.workspace_bytes = (launch.workspace_bytes - bytes) / 256 * 256;
  float* const scores = reinterpret_cast<float*>(static_cast<char*>(launch.workspace) + rest.workspace_bytes);
  kernels::MoeChoice choice;
  choice.scores = kernels::MakeTensor(scores, kernels::DType::kF32, rows, experts);
  choice.bias = args.bias, choice.normalize = args.normalize, choice.scale = args.scale;
  choice.row_count = args.row_count;
  choice.expert_ids = args.expert_ids, choice.weights = args.weights;
  const bool shared = args.shared_gate_up.rows > 0;
  kernels::GemmArgs down{args.shared_inner, args.shared_down, args.shared_y};
  cudaError_t error = cudaSuccess;
  if (args.w.dtype == kernels::DType::kBF16) {
    kernels::GemmArgs gemm{args.x, args.w, choice.scores};
    if (shared) {
      gemm.beside_w = args.shared_gate_up;
      gemm.beside_y = down.x = args.shared_inner.Columns(0, inner);
      gemm.beside_gated = true;
    }
    error = Gemm(rest, gemm);
  } else {
    ByType(args.x.dtype, [&](auto* t) {
      using T = std::remove_pointer_t<decltype(t)>;
      error = LaunchAfter(launch, ScoreKernel<T>, dim3(static_cast<int>(rows), Blocks(experts, 8)), dim3(256),
                          0, Data<T>(args.x), args.x.stride, Data<float>(args.w), args.w.stride, args.x.cols,
                          static_cast<int>(experts), scores);
    });
    down.gated = true;
    down.x = args.shared_inner.Columns(0, 2 * inner);
    if (error == cudaSuccess && shared) error = Gemm(rest, {args.x, args.shared_gate_up, down.x});
  }
  return error == cudaSuccess ? ChooseExperts(rest, choice, args.top_k, down) : error;
}

cudaError_t ChooseExperts(const Launch& launch, const kernels::MoeChoice& args, int64_t top_k,
                          const kernels::GemmArgs& beside) {
  const int64_t rows = args.scores.rows, experts = args.scores.cols;
  if (experts > kMaxRouted || top_k > kernels::kMaxExpertsPerToken || top_k > experts ||
      args.scores.dtype != kernels::DType::kF32 || args.scores.stride != experts) {
    return cudaErrorInvalidValue;
  }
  const ChoiceParams choice{Data<float>(args.scores),
                            args.bias,
                            args.row_count,
                            args.expert_ids,
                            args.weights,
                            static_cast<int>(rows),
                            static_cast<int>(experts),
                            static_cast<int>(top_k),
                            args.normalize,
                            args.scale};
  if (beside.w.rows > 0) {
    const SkinnyGemm gemm = MakeSkinny(beside.x, beside.w, beside.y);
    if (!beside.gated && beside.x.dtype == kernels::DType::kBF16 && rows <= kSkinnyRows &&
        experts <= kChoiceExperts && Fits(gemm)) {
      return RunSkinnyAndChoose(launch, gemm, choice);
    }
    if (const cudaError_t error = Gemm(launch, beside); error != cudaSuccess) return error;
  }
  const auto kernel = experts <= kFewExperts      ? ChooseKernel<kFewExperts / kChoiceThreads>
                      : experts <= kChoiceExperts ? ChooseKernel<kChoiceExperts / kChoiceThreads>
                                                  : ChooseKernel<kMaxRouted / kChoiceThreads>;
  return LaunchAfter(launch, kernel, dim3(static_cast<int>(rows)), dim3(kChoiceThreads), 0, choice);
}

}  // namespace kdt::cuda
