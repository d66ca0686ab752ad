// y = x W^T: which kernel takes which shape. docs/kernels.md, "gemm", has the figures behind the choices.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/gemm/choose.cuh"
#include "kernels/cuda/gemm/library.h"
#include "kernels/cuda/gemm/skinny.h"
#include "kernels/cuda/gemm/stream.cuh"
#include "kernels/cuda/gemm/tile.cuh"

namespace kdt::cuda {
namespace {

constexpr int kMaxSplits = 16;
constexpr int kGatedRows = 32;  // more: the activation is made once, not in every block

struct ChooseAll {
  ChoiceParams p;
  __device__ void operator()() const {
    for (int row = threadIdx.x >> 5; row < p.rows; row += blockDim.x >> 5)
      ChooseRow<kChoiceExperts / 32>(p, row);
  }
};

// How many blocks share the inputs of a tile. By the shape of W alone: a row's bits depend on it.
int Splits(int tiles, int pieces, int processors) {
  int splits = (3 * processors + tiles) / (2 * tiles);
  const int most = pieces / 8;  // a warp should have two pieces or more
  if (splits > most) splits = most;
  if (splits > kMaxSplits) splits = kMaxSplits;
  return splits < 1 ? 1 : splits;
}

template <typename S, int kBlocks, typename More>
cudaError_t Run(const Launch& launch, const StreamParams& p, int heads, const More& more) {
  const int tiles = Blocks(p.part[0].outs, S::kOuts) + Blocks(p.part[1].outs, S::kOuts);
  const dim3 grid(Blocks(p.rows, S::kRows), tiles * p.splits, heads);
  if (static_cast<int64_t>(grid.x) * grid.y * grid.z >= kCounters) return cudaErrorInvalidValue;
  return LaunchAfter(launch, StreamKernel<S, kBlocks, More>, grid, dim3(S::kThreads), S::kShared, p, more);
}

// `tiles`: of 16 outputs, of all parts and heads.
template <int kTiles, typename More>
cudaError_t ForOuts(const Launch& launch, const StreamParams& p, int heads, int tiles, const More& more) {
  const bool wide = static_cast<int64_t>(tiles) * p.splits >= 2 * launch.processors;
  if constexpr (kTiles == 1) {
    return wide ? Run<StreamShape<2, 1, 4, 3>, 2>(launch, p, heads, more)
                : Run<StreamShape<1, 1, 8, 3>, 2>(launch, p, heads, more);
  } else if constexpr (kTiles == 2) {
    return wide ? Run<StreamShape<2, 2, 4, 3>, 2>(launch, p, heads, more)
                : Run<StreamShape<1, 2, 6, 3>, 2>(launch, p, heads, more);
  } else {
    return wide ? Run<StreamShape<2, 4, 4, 2>, 2>(launch, p, heads, more)
                : Run<StreamShape<1, 4, 6, 2>, 2>(launch, p, heads, more);
  }
}

StreamPart Part(const bf16* w, int64_t outs, int64_t w_stride, const kernels::Tensor& y, int64_t y_head) {
  StreamPart part;
  part.w = w;
  part.y = y.data;
  part.w_stride = w_stride;
  part.y_stride = y.stride;
  part.outs = static_cast<int>(outs);
  part.f32 = y.dtype == kernels::DType::kF32;
  part.whole = outs % 4 == 0 && y.stride % 4 == 0 && y_head % 4 == 0 && Aligned16(y.data);
  return part;
}

template <typename More>
cudaError_t Skinny(const Launch& launch, const SkinnyGemm& gemm, const More& more) {
  StreamParams p;
  p.x = Data<bf16>(gemm.x);
  p.x_stride = gemm.x.stride;
  p.x_head = gemm.x_head;
  p.w_head = gemm.w_head;
  p.y_head = gemm.y_head;
  p.rows = static_cast<int>(gemm.x.rows);
  const int64_t inputs = gemm.gated ? gemm.x.cols / 2 : gemm.x.cols;
  p.chunks = static_cast<int>(inputs / 8);
  p.accumulate = gemm.accumulate;
  p.part[0] = Part(gemm.w, gemm.outs, gemm.w_stride, gemm.y, gemm.y_head);
  p.part[1] = Part(Data<bf16>(gemm.beside), gemm.beside.rows, gemm.beside.stride, gemm.beside_y, 0);
  const int64_t outs = (gemm.outs + 3) / 4 * 4 + (gemm.beside.rows + 3) / 4 * 4;
  const int heads = static_cast<int>(gemm.heads);
  const int tiles = heads * (Blocks(gemm.outs, 16) + Blocks(gemm.beside.rows, 16));
  p.splits = Splits(tiles, (p.chunks + 7) / 8, launch.processors);
  p.partial = static_cast<float*>(launch.workspace);
  p.counters = launch.counters;
  if (p.splits > 1 &&
      static_cast<size_t>(p.splits * gemm.heads * p.rows * outs) * sizeof(float) > launch.workspace_bytes) {
    return cudaErrorInvalidValue;
  }
  if constexpr (std::is_same_v<More, NothingMore>) {
    if (gemm.gated) {
      if (p.rows <= 8) return Run<StreamShape<2, 1, 4, 3, true>, 2>(launch, p, heads, more);
      if (p.rows <= 16) return Run<StreamShape<2, 2, 3, 3, true>, 2>(launch, p, heads, more);
      return Run<StreamShape<2, 4, 2, 2, true>, 2>(launch, p, heads, more);
    }
  }
  if (p.rows <= 8) return ForOuts<1>(launch, p, heads, tiles, more);
  if constexpr (!std::is_same_v<More, NothingMore>) return cudaErrorInvalidValue;
  if (p.rows <= 16) return ForOuts<2>(launch, p, heads, tiles, more);
  return ForOuts<4>(launch, p, heads, tiles, more);
}

// Any shape: a warp an output and row.
template <typename Y, bool kGated>
__global__ void __launch_bounds__(256)
    PlainKernel(const bf16* x, int64_t x_stride, const bf16* w, int64_t w_stride, int64_t inputs, int outs,
                Y* y, int64_t y_stride, bool accumulate) {
  LaunchDependents();
  WaitForPrevious();
  const int out = blockIdx.y * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (out >= outs) return;
  x += blockIdx.x * x_stride;
  w += out * w_stride;
  float sum = 0.0f;
  for (int64_t i = lane; i < inputs; i += 32) {
    float in = ToFloat(x[i]);
    if constexpr (kGated) in = Rounded<bf16>(in / (1.0f + expf(-in)) * ToFloat(x[inputs + i]));
    sum = fmaf(in, ToFloat(w[i]), sum);
  }
  sum = WarpSum(sum);
  if (lane != 0) return;
  Y* to = y + blockIdx.x * y_stride + out;
  *to = FromFloat<Y>(accumulate ? ToFloat(*to) + sum : sum);
}

// The library where it is there, else tiles of 128 rows.
cudaError_t ManyRows(const Launch& launch, const kernels::GemmArgs& args) {
  if (Aligned16(args.y.data) && args.y.stride * kernels::DTypeSize(args.y.dtype) % 16 == 0) {
    const cudaError_t error = LibraryGemm(launch, args);
    if (error != cudaErrorNotSupported) return error;
  }
  StreamParams p{};
  p.x = Data<bf16>(args.x);
  p.x_stride = args.x.stride;
  p.rows = static_cast<int>(args.x.rows);
  p.chunks = static_cast<int>(args.w.cols / 8);
  p.accumulate = args.accumulate;
  p.part[0] = Part(Data<bf16>(args.w), args.w.rows, args.w.stride, args.y, 0);
  p.partial = static_cast<float*>(launch.workspace);
  p.counters = launch.counters;
  const auto run = [&]<typename S>(S) {
    const int rows = Blocks(p.rows, S::kRows), outs = Blocks(p.part[0].outs, S::kOuts);
    const int64_t share = static_cast<int64_t>(p.rows) * ((p.part[0].outs + 3) / 4 * 4) * sizeof(float);
    const int64_t most =
        std::min<int64_t>(static_cast<int64_t>(launch.workspace_bytes) / share, p.chunks / 64);
    p.splits = static_cast<int>(std::clamp<int64_t>(2 * launch.processors / (rows * outs), 1,
                                                    std::max<int64_t>(1, std::min<int64_t>(most, 6))));
    if (rows * outs >= kCounters) return cudaErrorInvalidValue;
    return LaunchAfter(launch, TileKernel<S>, dim3(rows, outs * p.splits), dim3(S::kThreads), S::kShared, p);
  };
  return args.x.rows <= 256 ? run(TileShape<64>{}) : run(TileShape<128>{});
}

// Many rows: the activation once, at the end of the workspace, not in every block.
cudaError_t GatedApart(const Launch& launch, const kernels::GemmArgs& args) {
  const size_t bytes = (static_cast<size_t>(args.x.rows * args.w.cols) * sizeof(bf16) + 255) / 256 * 256;
  if (bytes > launch.workspace_bytes) return cudaErrorInvalidValue;
  Launch rest = launch;
  rest.workspace_bytes = (launch.workspace_bytes - bytes) / 256 * 256;
  kernels::GemmArgs plain = args;
  plain.gated = false;
  plain.x = kernels::MakeTensor(static_cast<char*>(launch.workspace) + rest.workspace_bytes,
                                kernels::DType::kBF16, args.x.rows, args.w.cols);
  if (const cudaError_t error = SiluMul(launch, {args.x, plain.x}); error != cudaSuccess) return error;
  return Gemm(rest, plain);
}

}  // namespace

bool Fits(const SkinnyGemm& gemm) {
  const int64_t inputs = gemm.gated ? gemm.x.cols / 2 : gemm.x.cols;
  return inputs % 32 == 0 && inputs > 0 && gemm.x.stride % 8 == 0 && gemm.x_head % 8 == 0 &&
         gemm.w_stride % 8 == 0 && gemm.w_head % 8 == 0 && Aligned16(gemm.x.data) && Aligned16(gemm.w) &&
         gemm.beside.stride % 8 == 0 && Aligned16(gemm.beside.data);
}

cudaError_t RunSkinny(const Launch& launch, const SkinnyGemm& gemm) {
  return Skinny(launch, gemm, NothingMore{});
}

cudaError_t RunSkinnyAndChoose(const Launch& launch, const SkinnyGemm& gemm, const ChoiceParams& choice) {
  return Skinny(launch, gemm, ChooseAll{choice});
}

cudaError_t Gemm(const Launch& launch, const kernels::GemmArgs& args) {
  if (args.x.rows == 0 || args.w.rows == 0) return cudaSuccess;
  if (args.x.dtype != kernels::DType::kBF16 || args.w.dtype != kernels::DType::kBF16)
    return cudaErrorInvalidValue;
  SkinnyGemm gemm;
  gemm.x = args.x;
  gemm.w = Data<bf16>(args.w);
  gemm.outs = args.w.rows;
  gemm.w_stride = args.w.stride;
  gemm.y = args.y;
  gemm.accumulate = args.accumulate;
  gemm.gated = args.gated;
  if (args.gated && args.x.rows > kGatedRows) return GatedApart(launch, args);
  if (Fits(gemm)) return args.x.rows > kSkinnyRows ? ManyRows(launch, args) : RunSkinny(launch, gemm);
  const auto run = [&](auto* kernel, auto* y) {
    return LaunchAfter(launch, kernel, dim3(static_cast<int>(args.x.rows), Blocks(args.w.rows, 8)), dim3(256),
                       0, Data<bf16>(args.x), args.x.stride, Data<bf16>(args.w), args.w.stride, args.w.cols,
                       static_cast<int>(args.w.rows), y, args.y.stride, args.accumulate);
  };
  if (args.y.dtype == kernels::DType::kF32) {
    return run(args.gated ? PlainKernel<float, true> : PlainKernel<float, false>, Data<float>(args.y));
  }
  return run(args.gated ? PlainKernel<bf16, true> : PlainKernel<bf16, false>, Data<bf16>(args.y));
}

}  // namespace kdt::cuda
