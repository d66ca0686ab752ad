// Routed experts: one kernel of persistent blocks for gate_up, silu and down (moe/schedule.cuh: the order of
// work; moe/int4.cuh: the products), and for more than a few rows a second one that sums over experts.
// Each warp streams its weights through its own ring in shared memory, a step ahead of its products, across
// the borders of tiles, experts and phases. Weights of an expert are read once for up to eight of its rows,
// and again, mostly out of L2, for each further eight. Up to eight rows the choice of the experts and the
// shared experts' down product are its first part (moe/choose.cuh, moe/shared_down.cuh).
#include <algorithm>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/gemm/skinny.h"
#include "kernels/cuda/moe/down.cuh"
#include "kernels/cuda/moe/gate_up.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

// The parameters are on their way all at once, not a line at each first use.
__device__ __forceinline__ void TouchAll(const MoeParams& p) {
  constexpr int kWords = sizeof(p) / sizeof(unsigned), kLine = 16;
  const auto* const words = reinterpret_cast<const unsigned*>(&p);
  unsigned any = words[kWords - 1];
#pragma unroll
  for (int i = 0; i < kWords; i += kLine) any |= words[i];
  WaitForLoad(any);
}

template <Form kForm>
__global__ void __launch_bounds__(kMoeThreads, 1) MoeKernel(const __grid_constant__ MoeParams p) {
  constexpr int kTeams = SlicesEach(kForm), kTeamWarps = kMoeWarps / kTeams;
  // The block's teams begin with neighbouring tiles, which share their inputs.
  constexpr int kClaimed = kForm == Form::kFour ? kTeams : 1;
  extern __shared__ __align__(128) unsigned char dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int count = p.rows * p.top_k;
  uint16_t* const pairs =
      kForm == Form::kMost ? p.pairs + blockIdx.x * count : reinterpret_cast<uint16_t*>(&shared + 1);
  Few& few = *reinterpret_cast<Few*>(dynamic + kFewBytes);
  const bool chooses = IsDirect(kForm) && p.choice.scores != nullptr,
             shares = IsDirect(kForm) && p.shared_pieces > 0;
  LaunchDependents();
  TouchAll(p);
  RowChoice<RowWarps(kForm)> row_choice(p.choice, shared.chosen, warp, lane);
  SharedDown shared_down(p, Worker<kForm>::FirstTile(warp), warp, lane);
  if (chooses) row_choice.Prepare();
  if (shares) shared_down.LoadWeights();
  // A warp's lanes make barriers one after the other, so each warp makes some.
  if (lane == 0) {
    BarrierInit(SharedAddress(&shared.landed[warp][0]), 32);
    BarrierInit(SharedAddress(&shared.landed[warp][1]), 32);
    if (warp < kTeams) BarrierInit(SharedAddress(&shared.full[warp]), kTeamWarps * 32);
    if (warp < kTeams) BarrierInit(SharedAddress(&shared.empty[warp]), 32);
    if (warp < kTeams * kTickets)
      BarrierInit(SharedAddress(&shared.drawn[warp / kTickets][warp % kTickets]), 1);
  }
  if (threadIdx.x == 0) {
    shared.surplus = make_uint4(kSurplusLow, kSurplusLow, kSurplusHigh, kSurplusHigh);
    if (IsDirect(kForm)) shared.choice.held = 0;
  }
  PrepareChoice(reinterpret_cast<int*>(shared.exchange));
  __syncthreads();
  WaitForPrevious();
  // All of this is on its way at once: the first tickets, the choice and its weights.
  const bool draws = lane == 0 && warp % (kTeamWarps * kClaimed) == kTeamWarps * kClaimed - 1;
  unsigned ticket = 0;
  if (draws) DrawTickets<kClaimed>(ticket, p.state);
  unsigned launches[2] = {};
  if (draws) {
    launches[0] = PhaseWords(p, 0)[kLaunchNumber];
    launches[1] = PhaseWords(p, kPhaseBit)[kLaunchNumber];
  }
  const int32_t* ids = p.ids;
  if (chooses) {
    row_choice.Load();
    // Not later: they would come behind the experts' weights.
    if (shares) shared_down.LoadInputs();
    row_choice.Choose();
    ids = shared.chosen.ids;
    if (p.rows == 1) {
      __syncwarp();  // the first warp has chosen, and makes the list
    } else {
      __syncthreads();
    }
  } else if (IsDirect(kForm) && threadIdx.x >= 64 && threadIdx.x - 64 < count) {
    // The first two warps have the ids.
    shared.choice.weights[threadIdx.x - 64] = p.weights[threadIdx.x - 64];
  }
  if (HasMail(kForm) && p.rows > 1) {
    MakeWarpChoice(shared.choice, pairs, ids, count, static_cast<int>(p.w.first_expert),
                   static_cast<int>(p.w.experts));
  } else if (IsDirect(kForm) && p.rows > 1 && p.few_ids) {
    MakeFewChoice(shared.choice, pairs, ids, p.rows, static_cast<int>(p.w.first_expert),
                  static_cast<int>(p.w.experts));
  } else {
    MakeChoice(shared.choice, pairs, reinterpret_cast<int*>(shared.exchange), ids, count, p.rows == 1,
               static_cast<int>(p.w.first_expert), static_cast<int>(p.w.experts));
  }
  if (draws) {
#pragma unroll
    for (int i = 0; i < kClaimed; ++i)
      shared.tickets[warp / kTeamWarps - i][kTickets - 1] = (ticket & ~kPhaseBit) + kClaimed - 1 - i;
    if (warp == kMoeWarps - 1) {
      shared.phase = ticket & kPhaseBit;
      const unsigned launch = ((ticket & kPhaseBit) == 0 ? launches[0] : launches[1]) + 1;
      shared.launch = launch + (launch == 0);  // zero is what mail never written has
    }
  }
  __syncthreads();
  const int active = shared.choice.active;
  Worker<kForm> worker(p, shared, few, pairs, warp, lane);
  if (active > 0) worker.Start();
  if (chooses) row_choice.Finish(shared.choice.weights, blockIdx.x == 0);
  if (shares) {
    shared_down.Multiply(shared.shared_sums[warp / kDirectTeam]);
    __syncthreads();
    worker.FinishShared();
  }
  if (chooses || shares) __syncthreads();
  // The other set of words is for the next launch; the launch that used it has ended.
  if (blockIdx.x == 0) {
    unsigned* const other = PhaseWords(p, shared.phase ^ kPhaseBit);
    for (int i = threadIdx.x; i <= kDownTicket; i += kMoeThreads) other[i] = 0;
    if (threadIdx.x == 0) other[kLaunchNumber] = shared.launch;
  }
  if (draws) ResetAfterLast(p, shared.choice, kTeams, shared.phase, (ticket & ~kPhaseBit) + kClaimed - 1);
  if (active == 0) {
    if (IsDirect(kForm) && shares) worker.SumNothing();
    if (IsDirect(kForm) && !p.accumulate) {
      for (int64_t i = blockIdx.x * kMoeThreads + threadIdx.x; i < p.rows * p.w.hidden;
           i += gridDim.x * kMoeThreads) {
        const int64_t at = i / p.w.hidden * p.out_stride + i % p.w.hidden;
        if (p.out_is_float) {
          static_cast<float*>(p.out)[at] = 0.0f;
        } else {
          static_cast<bf16*>(p.out)[at] = FromFloat<bf16>(0.0f);
        }
      }
    }
    return;
  }
  worker.Run();
}

// Whether the teams of a form end about together: with few tiles of gate_up each (pairs of different
// experts), many would stand idle while others take one more. Then the whole block takes each tile, which
// costs a little more in the handing over of sums.
bool TeamsAreBusy(const Launch& launch, Form form, int64_t tiles) {
  const int64_t teams = static_cast<int64_t>(launch.processors) * SlicesEach(form);
  const int64_t turns = (tiles + teams - 1) / teams;
  return tiles * 5 >= turns * teams * 4;
}

bool WidthsFit(const kernels::Int4Experts& w) {
  return w.hidden % (kSlices * kGateStep * 32) == 0 && w.inner % (kStep * 32) == 0;
}

constexpr int kSumThreads = 256, kSumColumns = 4, kSumPairs = 8;

// A thread takes four columns of a row. Products are read before it is known which experts are held here, so
// that all of it is on its way at once; those of others are not used.
template <typename T>
__global__ void __launch_bounds__(kSumThreads) SumKernel(const __grid_constant__ MoeParams p, bool aligned) {
  const int64_t i = (static_cast<int64_t>(blockIdx.y) * kSumThreads + threadIdx.x) * kSumColumns;
  WaitForPrevious();
  LaunchDependents();
  if (i >= p.w.hidden) return;
  T* const out = static_cast<T*>(p.out) + blockIdx.x * p.out_stride + i;
  const bool whole = aligned && sizeof(T) == 2;
  uint2 packed = {};
  float before[kSumColumns] = {}, sum[kSumColumns] = {};
  if (p.accumulate && whole) packed = *reinterpret_cast<const uint2*>(out);
  if (p.accumulate && !whole) {
#pragma unroll
    for (int c = 0; c < kSumColumns; ++c) before[c] = ToFloat(out[c]);
  }
  const int first_pair = blockIdx.x * p.top_k;
#pragma unroll 1
  for (int first = 0; first < p.top_k; first += kSumPairs) {
    int id[kSumPairs];
    float weight[kSumPairs];
    float4 v[kSumPairs];
#pragma unroll
    for (int k = 0; k < kSumPairs; ++k) {
      const int pair = first_pair + min(first + k, p.top_k - 1);
      id[k] = p.ids[pair];
      weight[k] = p.weights[pair];
      v[k] = __ldcg(reinterpret_cast<const float4*>(p.product + pair * p.w.hidden + i));
    }
#pragma unroll
    for (int k = 0; k < kSumPairs; ++k) {
      const int64_t expert = id[k] - p.w.first_expert;
      if (first + k >= p.top_k || expert < 0 || expert >= p.w.experts) continue;
      sum[0] = fmaf(weight[k], v[k].x, sum[0]);
      sum[1] = fmaf(weight[k], v[k].y, sum[1]);
      sum[2] = fmaf(weight[k], v[k].z, sum[2]);
      sum[3] = fmaf(weight[k], v[k].w, sum[3]);
    }
  }
  if (whole) {
    before[0] = LowBf16(packed.x), before[1] = HighBf16(packed.x);
    before[2] = LowBf16(packed.y), before[3] = HighBf16(packed.y);
  }
  if (p.accumulate) {
#pragma unroll
    for (int c = 0; c < kSumColumns; ++c) sum[c] = before[c] + sum[c];
  }
  if (whole) {
    *reinterpret_cast<uint2*>(out) = make_uint2(PackBf16(sum[0], sum[1]), PackBf16(sum[2], sum[3]));
    return;
  }
#pragma unroll
  for (int c = 0; c < kSumColumns; ++c) out[c] = FromFloat<T>(sum[c]);
}

}  // namespace

namespace {

// Whether the choice, and the shared experts' down product where there is one, are parts of the kernel.
bool ChoosesHere(const Launch& launch, const kernels::MoeArgs& args) {
  const kernels::Int4Experts& w = args.weights;
  const kernels::Tensor &scores = args.choice.scores, &x = args.shared_inner, &down = args.shared_down;
  if (scores.rows == 0 || w.experts == 0 || !WidthsFit(w)) return false;
  if (args.x.rows > kBlockChoiceRows || args.top_k > kBlockChoiceTopK || scores.cols > kBlockChoiceExperts ||
      args.top_k > scores.cols || scores.stride != scores.cols || scores.dtype != kernels::DType::kF32) {
    return false;
  }
  return down.rows == 0 ||
         (down.cols % kSharedPiece == 0 && down.cols <= kSharedPieces * kSharedPiece &&
          down.stride % 8 == 0 && Aligned16(down.data) && x.dtype == kernels::DType::kBF16 &&
          x.stride % 8 == 0 && Aligned16(x.data) && down.rows == w.hidden &&
          w.hidden <= kDirectTeams * launch.processors * kTileRows);
}

}  // namespace

cudaError_t Moe(const Launch& launch, const kernels::MoeArgs& given) {
  kernels::MoeArgs args = given;
  if (args.x.rows == 0) return cudaSuccess;
  const int64_t choices = args.choice.scores.rows;
  if ((args.accumulate && args.shared_down.rows > 0) || (choices > 0 && choices != args.x.rows))
    return cudaErrorInvalidValue;
  const bool chooses = ChoosesHere(launch, args);
  if (!chooses && (args.choice.scores.rows > 0 || args.shared_down.rows > 0)) {
    const kernels::GemmArgs shared{args.shared_inner, args.shared_down, args.out};
    const cudaError_t error = args.choice.scores.rows > 0
                                  ? ChooseExperts(launch, args.choice, args.top_k, shared)
                                  : Gemm(launch, shared);
    if (error != cudaSuccess) return error;
  }
  if (args.choice.scores.rows > 0)
    args.expert_ids = args.choice.expert_ids, args.expert_weights = args.choice.weights;
  args.accumulate = args.accumulate || args.shared_down.rows > 0;
  const kernels::Int4Experts& w = args.weights;
  if (w.experts == 0) return cudaSuccess;
  const bool fits = args.x.dtype == kernels::DType::kBF16 && args.x.stride % 8 == 0 &&
                    reinterpret_cast<uintptr_t>(args.x.data) % 16 == 0 && w.experts <= kMaxExperts &&
                    w.hidden % kernels::kInt4Group == 0 && w.inner % kernels::kInt4Group == 0 &&
                    args.top_k > 0 && args.top_k <= 64 && launch.processors <= kMaxBlocks &&
                    MoeWorkspace(args.x.rows, args.top_k, w.inner, w.hidden) <= launch.workspace_bytes;
  if (!fits) return cudaErrorInvalidValue;
  MoeParams p{};
  p.x_stride = args.x.stride;
  p.w = w;
  p.top_k = static_cast<int>(args.top_k);
  p.out_is_float = args.out.dtype == kernels::DType::kF32;
  p.out_stride = args.out.stride;
  p.accumulate = args.accumulate;
  p.state = launch.counters + kCounters;
  p.gate_tiles = static_cast<int>(w.inner / 16);
  p.gate_inverse = static_cast<unsigned>((int64_t{1} << 32) / p.gate_tiles + 1);
  p.down_tiles = static_cast<int>(w.hidden / kTileRows);
  p.hidden_groups = static_cast<int>(w.hidden / 32);
  p.inner_groups = static_cast<int>(w.inner / 32);
  const bool fit = WidthsFit(w);
  if (chooses) {
    const kernels::MoeChoice& choice = args.choice;
    p.choice = {Data<float>(choice.scores),
                choice.bias,
                choice.row_count,
                choice.expert_ids,
                choice.weights,
                static_cast<int>(args.x.rows),
                static_cast<int>(choice.scores.cols),
                p.top_k,
                choice.normalize,
                choice.scale};
    p.shared_x = Data<bf16>(args.shared_inner), p.shared_x_stride = args.shared_inner.stride;
    p.shared_w = Data<bf16>(args.shared_down), p.shared_w_stride = args.shared_down.stride;
    p.shared_pieces = args.shared_down.rows > 0 ? static_cast<int>(args.shared_down.cols) / kSharedPiece : 0;
  }
  p.slice_groups = (p.hidden_groups + kSlices - 1) / kSlices;
  p.slice_steps = fit ? p.slice_groups / kGateStep : (p.slice_groups + kStep - 1) / kStep;
  const int64_t at_once = (fit ? kMaxPairs : kSharedPairs) / args.top_k;
  for (int64_t first = 0; first < args.x.rows; first += at_once) {
    p.rows = static_cast<int>(std::min(at_once, args.x.rows - first));
    const int64_t pairs = p.rows * args.top_k;
    const kernels::Tensor x = args.x.Rows(first, p.rows), out = args.out.Rows(first, p.rows);
    p.x = Data<bf16>(x);
    p.out = out.data;
    p.ids = args.expert_ids + first * args.top_k;
    p.weights = args.expert_weights + first * args.top_k;
    p.few_ids = p.top_k == kFewChoiceTopK && p.rows <= kFewChoiceRows && Aligned16(p.ids);
    const bool mails = pairs <= kMailPairs && pairs * w.inner <= kMoeMailWords;
    const bool one = p.rows == 1 && pairs <= kMailPairs && kMailCopies * pairs * w.inner <= kMoeMailWords;
    const bool fewest = mails && p.rows <= kFewestRows;
    const int64_t tiles = pairs * p.gate_tiles;
    const bool four = mails && p.rows > 1 && p.rows <= kFourRows &&
                      (p.rows > kFewestRows || TeamsAreBusy(launch, Form::kFour, tiles));
    const Form form = !fit                                        ? Form::kRagged
                      : pairs > kSharedPairs                      ? Form::kMost
                      : pairs > kDirectPairs || p.rows > kFewRows ? Form::kMany
                      : four                                      ? Form::kFour
                      : one                                       ? Form::kOne
                      : fewest                                    ? Form::kFewest
                      : TeamsAreBusy(launch, Form::kFew, tiles)   ? Form::kFew
                                                                  : Form::kWhole;
    p.product = static_cast<float*>(launch.workspace);
    p.activation = reinterpret_cast<bf16*>(p.product + pairs * w.hidden);
    p.pairs = reinterpret_cast<uint16_t*>(p.activation + pairs * w.inner);
    // A ticket needs about a step to come, and where warps draw tiles of down then another such.
    const int steps = SlicesEach(form) * p.slice_steps;
    p.take_at = std::min(steps, IsDirect(form) ? 1 : 2);
    p.draw_at = std::min(steps, p.take_at + 2);
    const auto kernel = form == Form::kOne      ? MoeKernel<Form::kOne>
                        : form == Form::kFewest ? MoeKernel<Form::kFewest>
                        : form == Form::kFour   ? MoeKernel<Form::kFour>
                        : form == Form::kFew    ? MoeKernel<Form::kFew>
                        : form == Form::kWhole  ? MoeKernel<Form::kWhole>
                        : form == Form::kMany   ? MoeKernel<Form::kMany>
                        : form == Form::kMost   ? MoeKernel<Form::kMost>
                                                : MoeKernel<Form::kRagged>;
    const cudaError_t error = LaunchAfter(
        launch, kernel, dim3(launch.processors), kMoeThreads,
        chooses ? kFewBytes + sizeof(Few) : MoeSharedBytes(form == Form::kMost ? 0 : static_cast<int>(pairs)),
        p);
    if (error != cudaSuccess) return error;
    if (IsDirect(form)) continue;
    const dim3 sum(p.rows, Blocks(w.hidden, kSumThreads * kSumColumns));
    const bool aligned = p.out_stride % kSumColumns == 0 && reinterpret_cast<uintptr_t>(p.out) % 8 == 0;
    const cudaError_t summed = LaunchAfter(launch, p.out_is_float ? SumKernel<float> : SumKernel<bf16>, sum,
                                           dim3(kSumThreads), 0, p, aligned);
    if (summed != cudaSuccess) return summed;
  }
  return cudaSuccess;
}

size_t MoeWorkspace(int64_t rows, int64_t top_k, int64_t inner, int64_t hidden) {
  const int64_t pairs = std::min<int64_t>(rows * top_k, kMaxPairs);
  const int64_t lists = pairs <= kSharedPairs ? 0 : kMaxBlocks * sizeof(uint16_t);
  return static_cast<size_t>(pairs) * (hidden * 4 + inner * 2 + lists);
}

}  // namespace kdt::cuda
