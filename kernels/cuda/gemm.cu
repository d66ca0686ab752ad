// y = x W^T: which kernel takes which shape. docs/kernels/gemm.md has the figures behind the choices.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/common/device.h"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/gemm/broad.cuh"
#include "kernels/cuda/gemm/choose.cuh"
#include "kernels/cuda/gemm/even.cuh"
#include "kernels/cuda/gemm/held.cuh"
#include "kernels/cuda/gemm/library.h"
#include "kernels/cuda/gemm/skinny.h"
#include "kernels/cuda/gemm/square.cuh"
#include "kernels/cuda/gemm/stream.cuh"
#include "kernels/cuda/gemm/tile.cuh"
#include "kernels/cuda/gemm/whole.cuh"

namespace kdt::cuda {
namespace {

constexpr int kTileOuts = 32;   // of a block
constexpr int kGatedRows = 16;  // more: the activation is made once, not in every block

// Blocks beside a product that choose the experts of rows, as many as they have whole groups of threads for.
struct ChooseRows {
  ChoiceParams p;
  template <int kPerLane>
  __device__ void Choose(int row, void* shared) const {
    ChooseRow(p, row, static_cast<ChoiceRoom<kPerLane>*>(shared)[threadIdx.x / kChoiceThreads]);
  }
  __device__ void operator()(int block, void* shared) const {
    const int groups = blockDim.x / kChoiceThreads, group = threadIdx.x / kChoiceThreads;
    const int row = block * groups + group;
    if (group >= groups || row >= p.rows) {
      WaitForPrevious();
    } else if (p.experts <= kFewExperts) {
      Choose<kFewExperts / kChoiceThreads>(row, shared);
    } else {
      Choose<kChoiceExperts / kChoiceThreads>(row, shared);
    }
  }
};

// Blocks of these kernels that the device holds at once.
int Slots(int processors) { return processors * (HoldsTwoLargest() ? 2 : 1); }

// How many blocks share the inputs of a tile: the fewest that leave at most a fifth of the slots empty in the
// last wave, or else those that leave the fewest empty. By the shape of W alone: a row's bits depend on it.
// Of more than four only eight, so that WholeKernel can do the same.
int Splits(int tiles, int pieces, int slots) {
  const int most = std::clamp((pieces + 1) / 5, 1, kMaxShares);
  int best = 1;
  double best_fill = 0;
  for (int splits = 1; splits <= most; splits = splits == 4 ? kMaxShares : splits + 1) {
    const int blocks = tiles * splits;
    const double fill = static_cast<double>(blocks) / (Blocks(blocks, slots) * slots);
    if (fill > best_fill) best = splits, best_fill = fill;
    if (best_fill >= 0.8) break;
  }
  return best;
}

// Blocks that share inputs count themselves, a counter a tile.
bool CountersSuffice(const StreamParams& p, int64_t tiles) { return p.splits == 1 || tiles <= kCounters; }

// The room of as many choices as a block makes.
template <typename S, typename Others>
constexpr bool kHasRoom = std::is_same_v<Others, NoOthers> ||
                          S::kShared >= S::kThreads / kChoiceThreads *
                                            sizeof(ChoiceRoom<kChoiceExperts / kChoiceThreads>);

// How many blocks in front, times row_blocks, the choice of all rows takes.
template <typename S, typename Others>
int OtherBlocks(const Others& others, int row_blocks) {
  if constexpr (std::is_same_v<Others, NoOthers>) {
    return 0;
  } else {
    return Blocks(others.p.rows, row_blocks * (S::kThreads / kChoiceThreads));
  }
}

template <typename S, typename Others>
cudaError_t Run(const Launch& launch, StreamParams p, int heads, const Others& others) {
  static_assert(kHasRoom<S, Others>);
  const int tiles = Blocks(p.part[0].outs, S::kOuts) + Blocks(p.part[1].outs, S::kOuts);
  const int row_blocks = Blocks(p.rows, S::kRows);
  p.others = OtherBlocks<S>(others, row_blocks);
  const dim3 grid(row_blocks, p.others + tiles * p.splits, heads);
  if (!CountersSuffice(p, static_cast<int64_t>(heads) * row_blocks * tiles)) return cudaErrorInvalidValue;
  return LaunchAfter(launch, StreamKernel<S, Others>, grid, dim3(S::kThreads), S::kShared, p, others);
}

// kTileOuts outputs a block, whatever the rows.
template <int kTiles, bool kGated, typename Others>
cudaError_t ForRows(const Launch& launch, const StreamParams& p, int heads, const Others& others) {
  constexpr int kInput = kTiles * (kGated ? 2 : 1);
  using S = StreamShape<4, 1, kTileOuts / 16, kTiles, kInput == 1 ? 4 : 3, kInput == 2 ? 5 : 3, kGated>;
  return Run<S>(launch, p, heads, others);
}

template <int kHalves, int kEach, int kDepth, int kHeld, int kAhead>
cudaError_t Whole(const Launch& launch, const StreamParams& p) {
  using S = WholeShape<kHalves, kEach, kDepth, kHeld, kAhead>;
  const int tiles = Blocks(p.part[0].outs, S::kOuts) + Blocks(p.part[1].outs, S::kOuts);
  return LaunchAfter(launch, WholeKernel<S>, dim3(tiles), dim3(S::kThreads), S::kShared, p);
}
cudaError_t WholeFor(const Launch& launch, const StreamParams& p) {
  return p.splits == 8 ? Whole<1, 2, 3, 1, 4>(launch, p) : Whole<2, 1, 3, 2, 7>(launch, p);
}

// By the inputs that they take at most.
using HeldFew = HeldShape<1, 2, 2, 4>;
using HeldMost = HeldShape<2, 4, 2, 2>;
// Shared memory of HeldMost's blocks, more than they use: registers let as many of them in as before, but a
// multiprocessor's memory is split otherwise, and a step is shorter.
constexpr size_t kHeldRoom = 45000;
template <typename S>
cudaError_t Held(const Launch& launch, const StreamParams& p, int heads) {
  const size_t shared = std::is_same_v<S, HeldMost> && HoldsTwoLargest()
                            ? std::max<size_t>(S::kSharedBytes, kHeldRoom)
                            : S::kSharedBytes;
  return LaunchAfter(launch, HeldKernel<S>, dim3(Blocks(p.part[0].outs, S::kOuts), heads), dim3(S::kThreads),
                     shared, p);
}

template <typename S>
cudaError_t Even(const Launch& launch, const StreamParams& p) {
  return LaunchAfter(launch, EvenKernel<S>, dim3(launch.processors), dim3(S::kThreads), S::kShared, p);
}
// The same with at most eight rows and more.
template <typename Few, typename More>
cudaError_t Even(const Launch& launch, const StreamParams& p) {
  return p.rows <= Few::kRows ? Even<Few>(launch, p) : Even<More>(launch, p);
}
// cudaErrorNotSupported: not the one for this product.
cudaError_t EvenFor(const Launch& launch, const StreamParams& p) {
  if (p.rows > kEvenRows || p.chunks * 8 <= HeldMost::kInputs || p.part[0].outs < 8 * launch.processors)
    return cudaErrorNotSupported;
  const int outs = Blocks(p.part[0].outs, launch.processors);  // of a block, at most
  if (p.splits == 1) {
    if (p.rows > 8) return cudaErrorNotSupported;  // BroadKernel is faster
    return outs > 56 ? Even<EvenShape<52, 1, 1, 1, 3, 0, true>>(launch, p)
                     : Even<EvenShape<56, 1, 1, 1, 3, 4>>(launch, p);
  }
  if (p.splits == 3 && outs <= 36)
    return Even<EvenShape<36, 1, 3, 3, 4, 0>, EvenShape<36, 2, 3, 3, 3, 0>>(launch, p);
  if (p.splits == 4 && outs <= 16 && p.chunks * 8 >= 3072)
    return Even<EvenShape<16, 1, 4, 2, 4, 0>, EvenShape<16, 2, 4, 2, 3, 0>>(launch, p);
  return cudaErrorNotSupported;
}

template <typename S, typename Others>
cudaError_t Broad(const Launch& launch, StreamParams p, int heads, const Others& others) {
  static_assert(kHasRoom<S, Others> && S::kThreads / kChoiceThreads <= 4);
  const int tiles = Blocks(p.part[0].outs, S::kOuts) + Blocks(p.part[1].outs, S::kOuts);
  const int row_blocks = Blocks(p.rows, S::kRows);
  p.others = OtherBlocks<S>(others, row_blocks);
  if (!CountersSuffice(p, static_cast<int64_t>(heads) * row_blocks * tiles)) return cudaErrorInvalidValue;
  return LaunchAfter(launch, BroadKernel<S, Others>, dim3(row_blocks, p.others + tiles * p.splits, heads),
                     dim3(S::kThreads), S::kShared, p, others);
}
// Tiles of 64 outputs and all of 33 to 64 rows, where these are more than half as many as multiprocessors and
// no more than all.
bool IsSquare(const Launch& launch, const StreamParams& p, int heads) {
  const int blocks = heads * p.splits * Blocks(p.part[0].outs, SquareShape::kOuts);
  return p.rows > 32 && p.part[1].outs == 0 && blocks <= launch.processors && 2 * blocks > launch.processors;
}
cudaError_t Square(const Launch& launch, const StreamParams& p, int heads) {
  const int tiles = Blocks(p.part[0].outs, SquareShape::kOuts);
  if (!CountersSuffice(p, static_cast<int64_t>(heads) * tiles)) return cudaErrorInvalidValue;
  return LaunchAfter(launch, SquareKernel<SquareShape>, dim3(1, tiles * p.splits, heads),
                     dim3(SquareShape::kThreads), SquareShape::kShared, p);
}
// Tiles of 32 outputs where the chip holds them all at once, with few rows each where it does not get too
// many; else wider ones, so that neither x nor W goes from L2 to the multiprocessors too often.
template <typename Others>
cudaError_t BroadFor(const Launch& launch, const StreamParams& p, int heads, const Others& others) {
  const int blocks = heads * p.splits * (Blocks(p.part[0].outs, 32) + Blocks(p.part[1].outs, 32));
  const int slots = Slots(launch.processors);
  const auto run = [&]<typename S>(S) { return Broad<S>(launch, p, heads, others); };
  if (blocks <= slots) {
    if (p.rows <= 16 || (p.rows > 32 && 4 * blocks <= slots)) return run(BroadShape<1, 2, 2, 3, 64, 2>{});
    if (p.rows <= 32 || 2 * blocks <= slots) return run(BroadShape<1, 2, 4, 2, 64, 2>{});
    return run(BroadShape<2, 2, 4, 1, 64, 2, 2>{});
  }
  if (blocks <= 2 * slots)
    return p.rows <= 32 ? run(BroadShape<2, 2, 4, 1, 64, 2, 2>{}) : run(BroadShape<2, 4, 8, 2, 32, 1, 6>{});
  return p.rows <= 32 ? run(BroadShape<1, 5, 4, 1, 64, 2, 5>{}) : run(BroadShape<2, 5, 8, 1, 32, 1, 8>{});
}
// Whether the kernel's offsets of 32 bits, in bytes, reach all of W and x.
bool IsBroad(const StreamParams& p) {
  const auto in_reach = [](int64_t rows, int64_t stride) {
    return rows * stride * static_cast<int64_t>(sizeof(bf16)) < int64_t{1} << 32;
  };
  return p.rows > kHeldRows && in_reach(p.part[0].outs, p.part[0].w_stride) &&
         in_reach(p.part[1].outs, p.part[1].w_stride) && in_reach(p.rows, p.x_stride);
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

StreamParams Params(const Launch& launch, const SkinnyGemm& gemm) {
  StreamParams p{};
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
  p.part[1].gated = gemm.beside_gated;
  const int tiles =
      static_cast<int>(gemm.heads) * (Blocks(gemm.outs, kTileOuts) + Blocks(gemm.beside.rows, kTileOuts));
  const int slots = Slots(launch.processors);
  p.splits = Splits(tiles, (p.chunks + 7) / 8, slots);
  // WholeKernel has a block of eight outputs (sixteen with four shares) a multiprocessor. Where the stream
  // has no more: four shares at once rather than eight in two waves.
  if (gemm.heads == 1 && slots == launch.processors && p.splits == 8 && 4 * tiles > slots &&
      2 * tiles <= slots)
    p.splits = 4;
  p.partial = static_cast<float*>(launch.workspace);
  p.counters = launch.counters;
  return p;
}

bool IsWhole(const SkinnyGemm& gemm, const StreamParams& p) {
  return p.rows <= kWholeRows && (p.splits == 4 || p.splits == 8) && gemm.heads == 1 && !gemm.gated;
}

template <typename Others>
cudaError_t Skinny(const Launch& launch, const SkinnyGemm& gemm, const Others& others) {
  const StreamParams p = Params(launch, gemm);
  const int heads = static_cast<int>(gemm.heads);
  const int64_t outs = (gemm.outs + 3) / 4 * 4 + (gemm.beside.rows + 3) / 4 * 4;
  if (p.splits > 1 &&
      static_cast<size_t>(p.splits * gemm.heads * p.rows * outs) * sizeof(float) > launch.workspace_bytes) {
    return cudaErrorInvalidValue;
  }
  if constexpr (std::is_same_v<Others, NoOthers>) {
    if (heads == 1 && !gemm.gated && gemm.beside.rows == 0) {
      const cudaError_t error = EvenFor(launch, p);
      if (error != cudaErrorNotSupported) return error;
    }
    if (IsWhole(gemm, p)) return WholeFor(launch, p);
    if (p.rows <= kHeldRows && p.splits == 1 && !gemm.gated && gemm.beside.rows == 0 &&
        p.chunks * 8 <= HeldMost::kInputs) {
      return p.chunks * 8 <= HeldFew::kInputs ? Held<HeldFew>(launch, p, heads)
                                              : Held<HeldMost>(launch, p, heads);
    }
    if (gemm.gated) {
      if (p.rows <= 8) return ForRows<1, true>(launch, p, heads, others);
      return p.rows <= kGatedRows ? ForRows<2, true>(launch, p, heads, others) : cudaErrorInvalidValue;
    }
  }
  if constexpr (std::is_same_v<Others, NoOthers>) {
    if (IsBroad(p) && IsSquare(launch, p, heads)) return Square(launch, p, heads);
  }
  if (IsBroad(p)) return BroadFor(launch, p, heads, others);
  return ForRows<1, false>(launch, p, heads, others);
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
    if constexpr (kGated) in = Rounded<bf16>(Silu(in) * ToFloat(x[inputs + i]));
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

bool IsBf16(const kernels::Tensor& t) { return t.dtype == kernels::DType::kBF16; }

// Few rows in one launch; else one after the other, with what goes into the activation at the end of the
// workspace.
cudaError_t GemmBeside(const Launch& launch, const kernels::GemmArgs& args) {
  if (args.gated || !IsBf16(args.x) || !IsBf16(args.w) || !IsBf16(args.beside_w))
    return cudaErrorInvalidValue;
  const SkinnyGemm together = MakeSkinny(args);
  if (args.x.rows == 0) return cudaSuccess;
  if (args.x.rows <= kSkinnyRows && args.w.rows > 0 && Fits(together)) return RunSkinny(launch, together);
  kernels::GemmArgs first = args;
  first.beside_w = first.beside_y = {};
  first.beside_gated = false;
  if (const cudaError_t error = Gemm(launch, first); error != cudaSuccess) return error;
  if (!args.beside_gated) return Gemm(launch, {args.x, args.beside_w, args.beside_y});
  const int64_t rows = args.x.rows, outs = args.beside_w.rows;
  const size_t bytes = (static_cast<size_t>(rows * outs) * sizeof(bf16) + 255) / 256 * 256;
  if (bytes > launch.workspace_bytes) return cudaErrorInvalidValue;
  Launch rest = launch;
  rest.workspace_bytes = (launch.workspace_bytes - bytes) / 256 * 256;
  const kernels::Tensor gate_up = kernels::MakeTensor(
      static_cast<char*>(launch.workspace) + rest.workspace_bytes, kernels::DType::kBF16, rows, outs);
  const cudaError_t error = Gemm(rest, {args.x, args.beside_w, gate_up});
  return error == cudaSuccess ? SiluMul(launch, {gate_up, args.beside_y}) : error;
}

}  // namespace

SkinnyGemm MakeSkinny(const kernels::GemmArgs& args) {
  SkinnyGemm gemm = MakeSkinny(args.x, args.w, args.y);
  gemm.accumulate = args.accumulate;
  gemm.gated = args.gated;
  gemm.beside = args.beside_w;
  gemm.beside_y = args.beside_y;
  gemm.beside_gated = args.beside_gated;
  return gemm;
}

bool Fits(const SkinnyGemm& gemm) {
  const int64_t inputs = gemm.gated ? gemm.x.cols / 2 : gemm.x.cols;
  return inputs % 32 == 0 && inputs > 0 && gemm.x.stride % 8 == 0 && gemm.x_head % 8 == 0 &&
         gemm.w_stride % 8 == 0 && gemm.w_head % 8 == 0 && Aligned16(gemm.x.data) && Aligned16(gemm.w) &&
         gemm.beside.stride % 8 == 0 && Aligned16(gemm.beside.data) &&
         (!gemm.beside_gated || (gemm.beside.rows % 16 == 0 && gemm.beside_y.dtype == kernels::DType::kBF16 &&
                                 gemm.beside_y.stride % 4 == 0 && Aligned16(gemm.beside_y.data)));
}

bool TakesWhole(const Launch& launch, const SkinnyGemm& gemm, StreamParams* params) {
  if (!Fits(gemm)) return false;
  *params = Params(launch, gemm);
  return IsWhole(gemm, *params);
}

cudaError_t RunSkinny(const Launch& launch, const SkinnyGemm& gemm) {
  return Skinny(launch, gemm, NoOthers{});
}

cudaError_t RunSkinnyAndChoose(const Launch& launch, const SkinnyGemm& gemm, const ChoiceParams& choice) {
  return Skinny(launch, gemm, ChooseRows{choice});
}

cudaError_t Gemm(const Launch& launch, const kernels::GemmArgs& args) {
  if (args.beside_w.rows > 0) return GemmBeside(launch, args);
  if (args.x.rows == 0 || args.w.rows == 0) return cudaSuccess;
  if (args.x.dtype != kernels::DType::kBF16 || args.w.dtype != kernels::DType::kBF16)
    return cudaErrorInvalidValue;
  const SkinnyGemm gemm = MakeSkinny(args);
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
