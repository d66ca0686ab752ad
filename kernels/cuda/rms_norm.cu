// One block a row. Where rows are whole chunks of eight values a thread keeps its one, two or four chunks in
// registers: weights are on their way before the wait, the row is read once. Other widths take two passes.
#include "kernels/cuda/common/chunk.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 512;

struct NormParams {
  const void* x;
  int64_t x_stride;
  void* residual;  // nullptr: none
  int64_t residual_stride;
  const bf16* weight;
  float eps;
  int n;
  void* out;
  int64_t out_stride;
};

// X: type of x and the residual.
template <typename X, typename Out, int kChunks>
__global__ void __launch_bounds__(kThreads) NormChunksKernel(const __grid_constant__ NormParams p) {
  __shared__ float shared[kThreads / 32];
  const int chunks = p.n / 8, lane = threadIdx.x & 31, warps = blockDim.x / 32;
  const auto at = [&](int c) { return static_cast<int>(threadIdx.x + c * blockDim.x); };
  uint4 weight[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (at(c) < chunks) weight[c] = reinterpret_cast<const uint4*>(p.weight)[at(c)];
  }
  LaunchDependents();
  WaitForPrevious();
  const X* x = static_cast<const X*>(p.x) + blockIdx.x * p.x_stride;
  float v[kChunks][8];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (at(c) < chunks) Load8(v[c], x + at(c) * 8);
  }
  if (p.residual != nullptr) {
    X* residual = static_cast<X*>(p.residual) + blockIdx.x * p.residual_stride;
    float before[kChunks][8];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (at(c) < chunks) Load8(before[c], residual + at(c) * 8);
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (at(c) >= chunks) continue;
#pragma unroll
      for (int i = 0; i < 8; ++i) v[c][i] = Rounded<X>(v[c][i] + before[c][i]);
      Store8(residual + at(c) * 8, v[c]);
    }
  }
  float squares = 0.0f;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (at(c) < chunks) squares += Squares8(v[c]);
  }
  squares = WarpSum(squares);
  if (lane == 0) shared[threadIdx.x / 32] = squares;
  __syncthreads();
  const float sum = WarpSum(lane < warps ? shared[lane] : 0.0f);
  const float factor = rsqrtf(sum / static_cast<float>(p.n) + p.eps);
  Out* out = static_cast<Out*>(p.out) + blockIdx.x * p.out_stride;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (at(c) >= chunks) continue;
    Scale8<X>(v[c], factor, weight[c]);
    Store8(out + at(c) * 8, v[c]);
  }
}

// Any width and alignment; the second pass finds the row in L1 or L2.
template <typename X, typename Out>
__global__ void __launch_bounds__(kThreads) NormKernel(const __grid_constant__ NormParams p) {
  __shared__ float shared[32];
  LaunchDependents();
  WaitForPrevious();
  const X* x = static_cast<const X*>(p.x) + blockIdx.x * p.x_stride;
  X* residual =
      p.residual != nullptr ? static_cast<X*>(p.residual) + blockIdx.x * p.residual_stride : nullptr;
  Out* out = static_cast<Out*>(p.out) + blockIdx.x * p.out_stride;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < p.n; i += blockDim.x) {
    float v = ToFloat(x[i]);
    if (residual != nullptr) {
      v = Rounded<X>(v + ToFloat(residual[i]));
      residual[i] = FromFloat<X>(v);
    }
    squares += v * v;
  }
  const float factor = rsqrtf(BlockSum(squares, shared) / static_cast<float>(p.n) + p.eps);
  const X* from = residual != nullptr ? residual : x;
  for (int i = threadIdx.x; i < p.n; i += blockDim.x) {
    out[i] = FromFloat<Out>(ToFloat(p.weight[i]) * Rounded<X>(ToFloat(from[i]) * factor));
  }
}

template <typename X, typename Out>
cudaError_t Norm(const Launch& launch, const kernels::RmsNormArgs& args) {
  const NormParams p{args.x.data,
                     args.x.stride,
                     args.residual.data,
                     args.residual.stride,
                     reinterpret_cast<const bf16*>(args.weight),
                     args.eps,
                     static_cast<int>(args.x.cols),
                     args.out.data,
                     args.out.stride};
  const dim3 grid(static_cast<unsigned>(args.x.rows));
  const bool in_chunks = InChunks(args.x) && InChunks(args.out) &&
                         (args.residual.data == nullptr || InChunks(args.residual)) &&
                         reinterpret_cast<uintptr_t>(args.weight) % 16 == 0;
  const int chunks = p.n / 8;
  const auto threads = [&](int each) { return dim3(Blocks(chunks, each * 32) * 32); };
  if (in_chunks && chunks <= kThreads / 2)
    return LaunchAfter(launch, NormChunksKernel<X, Out, 1>, grid, threads(1), 0, p);
  if (in_chunks && chunks <= kThreads * 2)
    return LaunchAfter(launch, NormChunksKernel<X, Out, 2>, grid, threads(2), 0, p);
  if (in_chunks && chunks <= kThreads * 4)
    return LaunchAfter(launch, NormChunksKernel<X, Out, 4>, grid, threads(4), 0, p);
  return LaunchAfter(launch, NormKernel<X, Out>, grid, kThreads, 0, p);
}

template <typename T>
__global__ void AddKernel(const T* x, int64_t x_stride, T* residual, int64_t residual_stride, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  LaunchDependents();
  WaitForPrevious();
  if (i >= n) return;
  T& sum = residual[blockIdx.x * residual_stride + i];
  sum = FromFloat<T>(ToFloat(sum) + ToFloat(x[blockIdx.x * x_stride + i]));
}

}  // namespace

cudaError_t RmsNorm(const Launch& launch, const kernels::RmsNormArgs& args) {
  if (args.x.rows == 0) return cudaSuccess;
  return ByType(args.x.dtype, [&](auto* t) {
    return ByType(args.out.dtype, [&](auto* u) {
      return Norm<std::remove_pointer_t<decltype(t)>, std::remove_pointer_t<decltype(u)>>(launch, args);
    });
  });
}

cudaError_t Add(const Launch& launch, const kernels::AddArgs& args) {
  if (args.x.rows == 0) return cudaSuccess;
  return ByType(args.x.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    return LaunchAfter(
        launch, AddKernel<T>, dim3(static_cast<unsigned>(args.x.rows), Blocks(args.x.cols, 512)), 512, 0,
        Data<T>(args.x), args.x.stride, Data<T>(args.residual), args.residual.stride, args.x.cols);
  });
}

}  // namespace kdt::cuda
