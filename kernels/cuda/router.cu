// Two launches: scores and the shared experts' gate and up with their activation, which read the same rows;
// then the shared experts' down product, and beside it, in blocks of its own, the choice of the experts.
// Without shared experts the choice is a launch by itself. Many rows, float32 weights and unusual shapes go
// one after the other.
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

// Scores and, in the columns of one half of shared_inner, what goes into the shared experts' down product.
SkinnyGemm Scores(const kernels::RouterArgs& args, const kernels::GemmArgs& scores) {
  SkinnyGemm gemm = MakeSkinny(scores.x, scores.w, scores.y);
  gemm.beside = args.shared_gate_up;
  gemm.beside_y = args.shared_inner;
  gemm.beside_gated = true;
  return gemm;
}
SkinnyGemm SharedDown(const kernels::RouterArgs& args) {
  return MakeSkinny(args.shared_inner.Columns(0, args.shared_down.cols), args.shared_down, args.shared_y);
}

cudaError_t Shared(const Launch& launch, const kernels::RouterArgs& args) {
  const cudaError_t error = Gemm(launch, {args.x, args.shared_gate_up, args.shared_inner});
  if (error != cudaSuccess) return error;
  kernels::GemmArgs down{args.shared_inner, args.shared_down, args.shared_y};
  down.gated = true;
  return Gemm(launch, down);
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
  const ChoiceParams choice{scores,
                            args.bias,
                            args.row_count,
                            args.expert_ids,
                            args.weights,
                            static_cast<int>(rows),
                            static_cast<int>(experts),
                            static_cast<int>(args.top_k),
                            args.normalize,
                            args.scale};
  const bool shared = args.shared_gate_up.rows > 0;
  cudaError_t error = cudaSuccess;
  if (args.w.dtype == kernels::DType::kBF16) {
    const kernels::GemmArgs gemm{args.x, args.w,
                                 kernels::MakeTensor(scores, kernels::DType::kF32, rows, experts)};
    const SkinnyGemm first = Scores(args, gemm), second = SharedDown(args);
    const bool bf16s =
        args.x.dtype == kernels::DType::kBF16 && (!shared || args.shared_inner.dtype == args.x.dtype);
    const bool together = bf16s && rows <= kSkinnyRows && experts <= kChoiceExperts && Fits(first) &&
                          (!shared || (inner % 8 == 0 && Aligned16(args.shared_inner.data) &&
                                       args.shared_inner.stride % 8 == 0 && Fits(second)));
    if (together) {
      if (error = RunSkinny(rest, first); error != cudaSuccess) return error;
      if (shared) return RunSkinnyAndChoose(rest, second, choice);
    } else {
      error = Gemm(rest, gemm);
    }
    if (error == cudaSuccess && shared && !together) error = Shared(rest, args);
  } else {
    if (shared) error = Shared(rest, args);
    if (error != cudaSuccess) return error;
    ByType(args.x.dtype, [&](auto* t) {
      using T = std::remove_pointer_t<decltype(t)>;
      error = LaunchAfter(launch, ScoreKernel<T>, dim3(static_cast<int>(rows), Blocks(experts, 8)), dim3(256),
                          0, Data<T>(args.x), args.x.stride, Data<float>(args.w), args.w.stride, args.x.cols,
                          static_cast<int>(experts), scores);
    });
  }
  if (error != cudaSuccess) return error;
  const auto kernel = experts <= kFewExperts      ? ChooseKernel<kFewExperts / kChoiceThreads>
                      : experts <= kChoiceExperts ? ChooseKernel<kChoiceExperts / kChoiceThreads>
                                                  : ChooseKernel<kMaxRouted / kChoiceThreads>;
  return LaunchAfter(launch, kernel, dim3(static_cast<int>(rows)), dim3(kChoiceThreads), 0, choice);
}

}  // namespace kdt::cuda
