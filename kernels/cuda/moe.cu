// Routed experts in three kernels, each a programmatic dependent of the one before:
//   gate_up  a block takes 16 gate rows and the 16 up rows beside them of one expert, its eight warps share
//   the inputs, and
//            it ends in silu(gate) * up for every pair (row, expert), rounded to bf16
//   down     a warp takes 16 hidden rows of one expert over all of the inner width
//   sum      each row adds its pairs up by rising expert
// Weights of an expert are read once for up to eight of its rows. All three find their expert in the router's
// choice themselves (moe/experts.cuh). In `down` the first weights are on their way before the wait for
// gate_up.
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/moe/experts.cuh"
#include "kernels/cuda/moe/int4.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kAhead = 3;      // units a lane has in flight
constexpr int kDownTiles = 2;  // tiles of 16 rows a warp of `down` has in flight

struct MoeParams {
  const bf16* x;
  int64_t x_stride;
  kernels::Int4Experts w;
  const int32_t* ids;
  const float* weights;
  int rows, top_k;
  bf16* activation;  // [pairs, inner]
  float* product;    // [pairs, hidden]
  void* out;
  int64_t out_stride;
  bool accumulate;
};

// Eight inputs of one group a lane, for four groups; groups past the end and columns without a pair give
// zeros.
__device__ __forceinline__ void LoadInputs(uint4 (&x)[4], const bf16* row, int unit, int groups, int t) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    x[j] = row != nullptr && unit * 4 + j < groups
               ? *reinterpret_cast<const uint4*>(row + unit * kUnit + j * 32 + t * 8)
               : make_uint4(0, 0, 0, 0);
  }
}

__global__ void __launch_bounds__(32 * kWarps) GateUpKernel(const __grid_constant__ MoeParams p) {
  __shared__ ExpertList list;
  __shared__ float sums[kWarps][2][16][9];
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int g = lane >> 2, t = lane & 3;
  const int inner = static_cast<int>(p.w.inner), hidden = static_cast<int>(p.w.hidden), groups = hidden / 32;
  const int pairs = p.rows * p.top_k;
  WaitForPrevious();
  LaunchDependents();
  const int expert = FindExpert(list, p.ids, pairs, static_cast<int>(p.w.first_expert),
                                static_cast<int>(p.w.experts), blockIdx.y);
  if (expert < 0) return;
  const int first_out = blockIdx.x * 16;
  const uint32_t* rows[2][2];  // gate and up; g and g + 8
  const uint16_t* scales[2][2];
#pragma unroll
  for (int part = 0; part < 2; ++part) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t row =
          static_cast<int64_t>(expert) * 2 * inner + part * inner + min(first_out + 8 * i + g, inner - 1);
      rows[part][i] = p.w.gate_up + row * (hidden / 8);
      scales[part][i] = p.w.gate_up_scale + row * groups;
    }
  }
  const int units = (groups + 3) / 4;
  for (int skip = 0;; skip += kListPairs) {
    ListPairs(list, p.ids, pairs, expert + static_cast<int>(p.w.first_expert), skip);
    const int count = min(list.count, kListPairs);
    for (int first = 0; first < count; first += 8) {
      const int pair = first + g < count ? list.pairs[first + g] : -1;
      const bf16* x = pair >= 0 ? p.x + pair / p.top_k * p.x_stride : nullptr;
      float acc[2][4] = {};
      Int4Unit ahead[kAhead][2];
#pragma unroll
      for (int d = 0; d < kAhead; ++d) {
        LoadUnit(ahead[d][0], rows[0], scales[0], warp + d * kWarps, groups, t);
        LoadUnit(ahead[d][1], rows[1], scales[1], warp + d * kWarps, groups, t);
      }
      for (int unit = warp; unit < units; unit += kAhead * kWarps) {
#pragma unroll
        for (int d = 0; d < kAhead; ++d) {
          const int now = unit + d * kWarps;
          if (now >= units) break;
          uint4 in[4];
          LoadInputs(in, x, now, groups, t);
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            TransposeQuad(ahead[d][part].words[0], t);
            TransposeQuad(ahead[d][part].words[1], t);
            MultiplyUnit(acc[part], ahead[d][part], in);
            LoadUnit(ahead[d][part], rows[part], scales[part], now + kAhead * kWarps, groups, t);
          }
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
        if (first + column < count && first_out + out < inner) {
          p.activation[static_cast<int64_t>(list.pairs[first + column]) * inner + first_out + out] =
              __float2bfloat16_rn(gate / (1.0f + expf(-gate)) * up);
        }
      }
      __syncthreads();
    }
    if (list.count <= kListPairs) break;
  }
}

__global__ void __launch_bounds__(32 * kWarps) DownKernel(const __grid_constant__ MoeParams p) {
  __shared__ ExpertList list;
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int g = lane >> 2, t = lane & 3;
  const int inner = static_cast<int>(p.w.inner), hidden = static_cast<int>(p.w.hidden), groups = inner / 32;
  const int pairs = p.rows * p.top_k;
  LaunchDependents();
  // The router's choice is older than gate_up, which has waited for it.
  const int expert = FindExpert(list, p.ids, pairs, static_cast<int>(p.w.first_expert),
                                static_cast<int>(p.w.experts), blockIdx.y);
  if (expert < 0) return;
  const int first_out = (blockIdx.x * kWarps + warp) * 16 * kDownTiles;
  const uint32_t* rows[kDownTiles][2];
  const uint16_t* scales[kDownTiles][2];
#pragma unroll
  for (int m = 0; m < kDownTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t row =
          static_cast<int64_t>(expert) * hidden + min(first_out + 16 * m + 8 * i + g, hidden - 1);
      rows[m][i] = p.w.down + row * (inner / 8);
      scales[m][i] = p.w.down_scale + row * groups;
    }
  }
  const int units = (groups + 3) / 4;
  Int4Unit ahead[2][kDownTiles];
#pragma unroll
  for (int d = 0; d < 2; ++d) {
#pragma unroll
    for (int m = 0; m < kDownTiles; ++m) LoadUnit(ahead[d][m], rows[m], scales[m], d, groups, t);
  }
  WaitForPrevious();
  for (int skip = 0;; skip += kListPairs) {
    ListPairs(list, p.ids, pairs, expert + static_cast<int>(p.w.first_expert), skip);
    const int count = min(list.count, kListPairs);
    for (int first = 0; first < count; first += 8) {
      const int pair = first + g < count ? list.pairs[first + g] : -1;
      const bf16* x = pair >= 0 ? p.activation + static_cast<int64_t>(pair) * inner : nullptr;
      float acc[kDownTiles][4] = {};
      if (skip + first > 0) {
#pragma unroll
        for (int d = 0; d < 2; ++d) {
#pragma unroll
          for (int m = 0; m < kDownTiles; ++m) LoadUnit(ahead[d][m], rows[m], scales[m], d, groups, t);
        }
      }
      for (int unit = 0; unit < units; unit += 2) {
#pragma unroll
        for (int d = 0; d < 2; ++d) {
          if (unit + d >= units) break;
          uint4 in[4];
          LoadInputs(in, x, unit + d, groups, t);
#pragma unroll
          for (int m = 0; m < kDownTiles; ++m) {
            TransposeQuad(ahead[d][m].words[0], t);
            TransposeQuad(ahead[d][m].words[1], t);
            MultiplyUnit(acc[m], ahead[d][m], in);
            if (unit + d + 2 < units) LoadUnit(ahead[d][m], rows[m], scales[m], unit + d + 2, groups, t);
          }
        }
      }
#pragma unroll
      for (int m = 0; m < kDownTiles; ++m) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int column = first + 2 * t + (c & 1), out = first_out + 16 * m + 8 * (c >> 1) + g;
          if (column < count && out < hidden)
            p.product[static_cast<int64_t>(list.pairs[column]) * hidden + out] = acc[m][c];
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
cudaError_t LaunchAfter(const Launch& launch, Kernel kernel, dim3 grid, int threads, const MoeParams& p) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
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
  p.product = static_cast<float*>(launch.workspace);
  p.activation = reinterpret_cast<bf16*>(p.product + pairs * w.hidden);
  p.out = args.out.data;
  p.out_stride = args.out.stride;
  p.accumulate = args.accumulate;

  const int active = static_cast<int>(pairs < w.experts ? pairs : w.experts);  // at most
  GateUpKernel<<<dim3(Blocks(w.inner, 16), active), 32 * kWarps, 0, launch.stream>>>(p);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  const dim3 down(Blocks(w.hidden, kWarps * 16 * kDownTiles), active);
  if (const cudaError_t error = LaunchAfter(launch, DownKernel, down, 32 * kWarps, p); error != cudaSuccess)
    return error;
  const dim3 sum(p.rows, Blocks(w.hidden, 256));
  return args.out.dtype == kernels::DType::kF32 ? LaunchAfter(launch, SumKernel<float>, sum, 256, p)
                                                : LaunchAfter(launch, SumKernel<bf16>, sum, 256, p);
}

size_t MoeWorkspace(int64_t rows, int64_t top_k, int64_t inner, int64_t hidden) {
  return static_cast<size_t>(rows * top_k) * (hidden * 4 + inner * 2);
}

}  // namespace kdt::cuda
