// Routed experts in four kernels, each a programmatic dependent of the one before:
//   prepare  each row of x as float16 pairs in the order the products want them, with one power of two a row
//   gate_up  a block takes 16 gate rows and the 16 up rows beside them of one expert, its eight warps share
//   the inputs, and
//            it ends in silu(gate) * up for every pair (row, expert), rounded to bf16
//   down     a warp takes 32 hidden rows of one expert over all of the inner width
//   sum      each row adds its pairs up by rising expert
// Weights of an expert are read once for up to eight of its rows. gate_up and down find their expert in the
// router's choice themselves (moe/experts.cuh), and their first weights are on their way before they wait for
// the kernel before.
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/moe/experts.cuh"
#include "kernels/cuda/moe/int4.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kAhead = 2;      // units a lane has in flight
constexpr int kDownTiles = 2;  // tiles of 16 rows of a warp of `down`

struct MoeParams {
  const bf16* x;
  int64_t x_stride;
  kernels::Int4Experts w;
  const int32_t* ids;
  const float* weights;
  int rows, top_k;
  uint4* pairs_in;   // [rows, hidden / 8]: x as pairs
  float* row_scale;  // [rows]: what the products of a row are to be multiplied by
  bf16* activation;  // [pairs, inner]
  float* product;    // [pairs, hidden]
  void* out;
  int64_t out_stride;
  bool accumulate;
};

__global__ void __launch_bounds__(256) PrepareKernel(const __grid_constant__ MoeParams p) {
  __shared__ float shared[8];
  LaunchDependents();
  const int chunks = static_cast<int>(p.w.hidden / 8);
  const uint4* from = reinterpret_cast<const uint4*>(p.x + blockIdx.x * p.x_stride);
  float top = 0.0f;
  for (int i = threadIdx.x; i < chunks; i += blockDim.x) top = fmaxf(top, LargestOf(from[i]));
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = top;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 8; ++i) top = fmaxf(top, shared[i]);
  const float scale = InputScale(top);
  if (threadIdx.x == 0) p.row_scale[blockIdx.x] = 1.0f / scale;
  uint4* to = p.pairs_in + static_cast<int64_t>(blockIdx.x) * chunks;
  for (int i = threadIdx.x; i < chunks; i += blockDim.x) to[i] = PairInputs(from[i], scale);
}

template <bool kWhole>
__global__ void __launch_bounds__(32 * kWarps, kWhole ? 2 : 1)
    GateUpKernel(const __grid_constant__ MoeParams p) {
  __shared__ ExpertList list;
  __shared__ float sums[kWarps][2][16][9];
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int g = lane >> 2, t = lane & 3;
  const int inner = static_cast<int>(p.w.inner), hidden = static_cast<int>(p.w.hidden), groups = hidden / 32;
  const int pairs = p.rows * p.top_k;
  LaunchDependents();
  const int first_expert = static_cast<int>(p.w.first_expert);
  const int expert = FindExpert(list, p.ids, pairs, first_expert, static_cast<int>(p.w.experts), blockIdx.y);
  if (expert < 0) {
    // No kernel of the chain may end before the one in front of it, also when no expert of this rank is
    // chosen.
    if (blockIdx.y == 0) WaitForPrevious();
    return;
  }
  const int first_out = blockIdx.x * 16;
  // The inner width is a multiple of 32, so tiles of 16 rows are whole.
  const int64_t row = static_cast<int64_t>(expert) * 2 * inner + first_out + g;
  const uint32_t* const words = p.w.gate_up + row * (hidden / 8);
  const uint16_t* const scales = p.w.gate_up_scale + row * groups;
  const int up_words = inner * (hidden / 8), up_scales = inner * groups;
  const int units = (groups + 3) / 4;
  Int4Unit ahead[kAhead][2];
  auto load_ahead = [&] {
#pragma unroll
    for (int d = 0; d < kAhead; ++d) {
      LoadUnit<kWhole>(ahead[d][0], words, scales, warp + d * kWarps, groups, t);
      LoadUnit<kWhole>(ahead[d][1], words + up_words, scales + up_scales, warp + d * kWarps, groups, t);
    }
  };
  load_ahead();
  WaitForPrevious();
  for (int skip = 0;; skip += kListPairs) {
    ListPairs(list, p.ids, pairs, list.expert + static_cast<int>(p.w.first_expert), skip);
    const int count = min(list.count, kListPairs);
    for (int first = 0; first < count; first += 8) {
      // Columns past the last pair repeat it; what they give is not stored.
      const int pair = list.pairs[min(first + g, count - 1)];
      const uint4* x = p.pairs_in + static_cast<int64_t>(pair / p.top_k) * (hidden / 8) + t;
      float acc[2][4] = {};
      if (skip + first > 0) load_ahead();
#pragma unroll 1
      for (int unit = warp; unit < units; unit += kAhead * kWarps) {
#pragma unroll
        for (int d = 0; d < kAhead; ++d) {
          const int now = unit + d * kWarps;
          if (now >= units) break;
          uint4 in[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) in[j] = x[(kWhole ? now * 4 + j : min(now * 4 + j, groups - 1)) * 4];
          MultiplyUnit(acc, ahead[d], in, t);
          LoadUnit<kWhole>(ahead[d][0], words, scales, now + kAhead * kWarps, groups, t);
          LoadUnit<kWhole>(ahead[d][1], words + up_words, scales + up_scales, now + kAhead * kWarps, groups,
                           t);
        }
      }
#pragma unroll
      for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[warp][part][8 * (c >> 1) + g][2 * t + (c & 1)] = acc[part][c];
      }
      __syncthreads();
      if (threadIdx.x < 128) {
        const int out = threadIdx.x & 15, column = threadIdx.x >> 4;
        float gate = 0.0f, up = 0.0f;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) gate += sums[i][0][out][column], up += sums[i][1][out][column];
        if (first + column < count) {
          const int to = list.pairs[first + column];
          const float scale = p.row_scale[to / p.top_k];
          gate *= scale;
          up *= scale;
          p.activation[static_cast<int64_t>(to) * inner + first_out + out] =
              __float2bfloat16_rn(gate / (1.0f + expf(-gate)) * up);
        }
      }
      __syncthreads();
    }
    if (list.count <= kListPairs) break;
  }
}

// Dynamic shared memory: eight pairs' activations as float16 pairs, a row every inner / 8 + 1 chunks.
template <bool kWhole>
__global__ void __launch_bounds__(32 * kWarps, kWhole ? 2 : 1)
    DownKernel(const __grid_constant__ MoeParams p) {
  extern __shared__ uint4 staged[];
  __shared__ ExpertList list;
  __shared__ float column_scale[8];
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int g = lane >> 2, t = lane & 3;
  const int inner = static_cast<int>(p.w.inner), hidden = static_cast<int>(p.w.hidden), groups = inner / 32;
  const int pairs = p.rows * p.top_k;
  LaunchDependents();
  const int first_expert = static_cast<int>(p.w.first_expert);
  const int expert = FindExpert(list, p.ids, pairs, first_expert, static_cast<int>(p.w.experts), blockIdx.y);
  if (expert < 0) {
    // No kernel of the chain may end before the one in front of it, also when no expert of this rank is
    // chosen.
    if (blockIdx.y == 0) WaitForPrevious();
    return;
  }
  // The hidden width is a multiple of 32 = 16 kDownTiles; warps past its end repeat the last tiles and store
  // nothing.
  const int wanted_out = (blockIdx.x * kWarps + warp) * 16 * kDownTiles;
  const int first_out = min(wanted_out, hidden - 16 * kDownTiles);
  const int64_t row = static_cast<int64_t>(expert) * hidden + first_out + g;
  const uint32_t* const words = p.w.down + row * (inner / 8);
  const uint16_t* const scales = p.w.down_scale + row * groups;
  const int units = (groups + 3) / 4;
  Int4Unit ahead[kAhead][kDownTiles];
  auto load_ahead = [&] {
#pragma unroll
    for (int d = 0; d < kAhead; ++d) {
#pragma unroll
      for (int m = 0; m < kDownTiles; ++m)
        LoadUnit<kWhole>(ahead[d][m], words + m * 16 * (inner / 8), scales + m * 16 * groups, d, groups, t);
    }
  };
  load_ahead();
  const int chunks = inner / 8, pitch = chunks + 1;
  WaitForPrevious();
  for (int skip = 0;; skip += kListPairs) {
    ListPairs(list, p.ids, pairs, list.expert + static_cast<int>(p.w.first_expert), skip);
    const int count = min(list.count, kListPairs);
    for (int first = 0; first < count; first += 8) {
      // Warp w brings in pair w; columns past the last pair repeat it.
      __syncthreads();
      const uint4* from = reinterpret_cast<const uint4*>(
          p.activation + static_cast<int64_t>(list.pairs[min(first + warp, count - 1)]) * inner);
      float top = 0.0f;
      for (int i = lane; i < chunks; i += 32) top = fmaxf(top, LargestOf(from[i]));
#pragma unroll
      for (int d = 16; d > 0; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
      const float scale = InputScale(top);
      if (lane == 0) column_scale[warp] = 1.0f / scale;
      for (int i = lane; i < chunks; i += 32) staged[warp * pitch + i] = PairInputs(from[i], scale);
      __syncthreads();
      float acc[kDownTiles][4] = {};
      if (skip + first > 0) load_ahead();
#pragma unroll 1
      for (int unit = 0; unit < units; unit += kAhead) {
#pragma unroll
        for (int d = 0; d < kAhead; ++d) {
          const int now = unit + d;
          if (now >= units) break;
          uint4 in[4];
#pragma unroll
          for (int j = 0; j < 4; ++j)
            in[j] = staged[g * pitch + (kWhole ? now * 4 + j : min(now * 4 + j, groups - 1)) * 4 + t];
          MultiplyUnit(acc, ahead[d], in, t);
#pragma unroll
          for (int m = 0; m < kDownTiles; ++m)
            LoadUnit<kWhole>(ahead[d][m], words + m * 16 * (inner / 8), scales + m * 16 * groups,
                             now + kAhead, groups, t);
        }
      }
#pragma unroll
      for (int m = 0; m < kDownTiles; ++m) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int column = 2 * t + (c & 1), out = first_out + 16 * m + 8 * (c >> 1) + g;
          if (first + column < count && wanted_out == first_out) {
            p.product[static_cast<int64_t>(list.pairs[first + column]) * hidden + out] =
                acc[m][c] * column_scale[column];
          }
        }
      }
    }
    if (list.count <= kListPairs) break;
  }
}

template <typename T>
__global__ void SumKernel(const __grid_constant__ MoeParams p) {
  const int64_t i = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  WaitForPrevious();
  if (i >= p.w.hidden) return;
  T* out = static_cast<T*>(p.out) + blockIdx.x * p.out_stride + i;
  float sum = 0.0f;
  for (int k = 0; k < p.top_k; ++k) {
    const int pair = blockIdx.x * p.top_k + k;
    const int64_t expert = p.ids[pair] - p.w.first_expert;
    if (expert >= 0 && expert < p.w.experts) sum += p.weights[pair] * p.product[pair * p.w.hidden + i];
  }
  *out = FromFloat<T>(p.accumulate ? ToFloat(*out) + sum : sum);
}

template <typename Kernel>
cudaError_t LaunchAfter(const Launch& launch, Kernel kernel, dim3 grid, int threads, size_t shared,
                        const MoeParams& p) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = launch.stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace

cudaError_t Moe(const Launch& launch, const kernels::MoeArgs& args) {
  const kernels::Int4Experts& w = args.weights;
  if (args.x.rows == 0 || w.experts == 0) return cudaSuccess;
  const bool fits = args.x.dtype == kernels::DType::kBF16 && args.x.stride % 8 == 0 &&
                    w.experts <= kMaxExperts && w.hidden % kernels::kInt4Group == 0 &&
                    w.inner % kernels::kInt4Group == 0 &&
                    MoeWorkspace(args.x.rows, args.top_k, w.inner, w.hidden) <= launch.workspace_bytes;
  if (!fits) return cudaErrorInvalidValue;
  const int64_t pairs = args.x.rows * args.top_k;
  MoeParams p;
  p.x = Data<bf16>(args.x);
  p.x_stride = args.x.stride;
  p.w = w;
  p.ids = args.expert_ids;
  p.weights = args.expert_weights;
  p.rows = static_cast<int>(args.x.rows);
  p.top_k = static_cast<int>(args.top_k);
  p.pairs_in = static_cast<uint4*>(launch.workspace);
  p.product = reinterpret_cast<float*>(p.pairs_in + args.x.rows * (w.hidden / 8));
  p.activation = reinterpret_cast<bf16*>(p.product + pairs * w.hidden);
  p.row_scale = reinterpret_cast<float*>(p.activation + pairs * w.inner);
  p.out = args.out.data;
  p.out_stride = args.out.stride;
  p.accumulate = args.accumulate;

  PrepareKernel<<<p.rows, 256, 0, launch.stream>>>(p);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  const int active = static_cast<int>(pairs < w.experts ? pairs : w.experts);  // at most
  const dim3 gate_up(Blocks(w.inner, 16), active);
  const auto gate_up_kernel = w.hidden % kUnit == 0 ? GateUpKernel<true> : GateUpKernel<false>;
  if (const cudaError_t error = LaunchAfter(launch, gate_up_kernel, gate_up, 32 * kWarps, 0, p);
      error != cudaSuccess)
    return error;
  const dim3 down(Blocks(w.hidden, kWarps * 16 * kDownTiles), active);
  const size_t staged = static_cast<size_t>(8 * (w.inner / 8 + 1)) * sizeof(uint4);
  const auto down_kernel = w.inner % kUnit == 0 ? DownKernel<true> : DownKernel<false>;
  if (const cudaError_t error = LaunchAfter(launch, down_kernel, down, 32 * kWarps, staged, p);
      error != cudaSuccess)
    return error;
  const dim3 sum(p.rows, Blocks(w.hidden, 256));
  return args.out.dtype == kernels::DType::kF32 ? LaunchAfter(launch, SumKernel<float>, sum, 256, 0, p)
                                                : LaunchAfter(launch, SumKernel<bf16>, sum, 256, 0, p);
}

size_t MoeWorkspace(int64_t rows, int64_t top_k, int64_t inner, int64_t hidden) {
  return static_cast<size_t>(rows * top_k) * (hidden * 4 + inner * 2) +
         static_cast<size_t>(rows) * (hidden * 2 + 4);
}

}  // namespace kdt::cuda
