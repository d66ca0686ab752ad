// Scores by the streaming gemm, whose last block chooses the experts of a few rows, a warp a row. More rows,
// float32 weights and unusual shapes have a launch of their own for the choice.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/gemm/choose.cuh"
#include "kernels/cuda/gemm/skinny.h"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

constexpr int kChooseRows = 2;     // of a block of ChooseKernel
constexpr int kMaxRouted = 1024;   // in a warp's registers
constexpr int kMaxRowsAtOnce = 4;  // chosen by the last block, a warp each

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
__global__ void __launch_bounds__(32 * kChooseRows) ChooseKernel(const __grid_constant__ ChoiceParams p) {
  LaunchDependents();
  WaitForPrevious();
  const int row = blockIdx.x * kChooseRows + (threadIdx.x >> 5);
  if (row < p.rows) ChooseRow<kPerLane>(p, row);
}

}  // namespace

cudaError_t Router(const Launch& launch, const kernels::RouterArgs& args) {
  const int64_t rows = args.x.rows, experts = args.w.rows;
  if (rows == 0) return cudaSuccess;
  const bool beside = args.beside_w.rows > 0;
  const size_t bytes = (static_cast<size_t>(rows * experts) * sizeof(float) + 255) / 256 * 256;
  if (experts > kMaxRouted || args.top_k > kernels::kMaxExpertsPerToken || args.top_k > experts ||
      bytes > launch.workspace_bytes) {
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
  cudaError_t error = cudaSuccess;
  if (args.w.dtype == kernels::DType::kBF16) {
    const kernels::GemmArgs gemm{args.x, args.w,
                                 kernels::MakeTensor(scores, kernels::DType::kF32, rows, experts)};
    SkinnyGemm skinny;
    skinny.x = gemm.x;
    skinny.w = Data<bf16>(gemm.w);
    skinny.outs = experts;
    skinny.w_stride = gemm.w.stride;
    skinny.y = gemm.y;
    skinny.beside = args.beside_w;
    skinny.beside_y = args.beside_y;
    if (args.x.dtype == kernels::DType::kBF16 && Fits(skinny) && rows <= kSkinnyRows) {
      if (rows <= kMaxRowsAtOnce && experts <= kChoiceExperts)
        return RunSkinnyAndChoose(rest, skinny, choice);
      error = RunSkinny(rest, skinny);
    } else {
      if (beside) error = Gemm(rest, {args.x, args.beside_w, args.beside_y});
      if (error == cudaSuccess) error = Gemm(rest, gemm);
    }
  } else {
    if (beside) error = Gemm(rest, {args.x, args.beside_w, args.beside_y});
    if (error != cudaSuccess) return error;
    ByType(args.x.dtype, [&](auto* t) {
      using T = std::remove_pointer_t<decltype(t)>;
      error = LaunchAfter(launch, ScoreKernel<T>, dim3(static_cast<int>(rows), Blocks(experts, 8)), dim3(256),
                          0, Data<T>(args.x), args.x.stride, Data<float>(args.w), args.w.stride, args.x.cols,
                          static_cast<int>(experts), scores);
    });
  }
  if (error != cudaSuccess) return error;
  const auto kernel = experts <= 384              ? ChooseKernel<384 / 32>
                      : experts <= kChoiceExperts ? ChooseKernel<kChoiceExperts / 32>
                                                  : ChooseKernel<kMaxRouted / 32>;
  return LaunchAfter(launch, kernel, dim3(Blocks(rows, kChooseRows)), dim3(32 * kChooseRows), 0, choice);
}

}  // namespace kdt::cuda
