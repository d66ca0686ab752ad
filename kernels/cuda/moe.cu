// Routed experts: one kernel of persistent blocks for gate_up, silu and down (moe/schedule.cuh: the order of
// work; moe/int4.cuh: the products), and for more than a few rows a second one that sums over experts.
// Weights of an expert are read
// once for up to eight of its rows, and again, mostly out of L2, for each further eight.
#include <algorithm>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/moe/schedule.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

constexpr int kDirectRows = 8, kDirectPairs = 64;  // the most for DownMode::kDirect
constexpr int kRingBytes = kMoeWarps * kStreamSlots * kUnitBytes;
constexpr int kExchangeBytes = kMoeWarps * 1024;  // of all warps' sums, or twice the products of kDirectPairs
constexpr int kMaxPairs = 3200;                   // of a launch
static_assert(kExchangeBytes >= 2 * kDirectPairs * kUnitRows * 4 && kDirectRows * 32 <= kMoeThreads);

// Dynamic shared memory: the rings, the exchange, then these and the list of pairs.
struct Control {
  uint4 surplus;
  Choice choice;
  int tickets[kTicketRing];
};
constexpr int MoeSharedBytes(int pairs) {
  return kRingBytes + kExchangeBytes + static_cast<int>(sizeof(Control)) + (pairs * 2 + 15) / 16 * 16;
}
static_assert(MoeSharedBytes(kMaxPairs) <= 101376);

__device__ __forceinline__ unsigned LoadAcquire(const unsigned* from) {
  unsigned v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

// One warp's share of a cell for one pass: acc = W x over its units. x is the column at inputs 8 t of the
// first unit.
template <bool kWhole>
__device__ __forceinline__ void MultiplyCell(float (&acc)[2][4], Stream<kWhole>& stream,
                                             const unsigned char* ring, int& slot, const Units& units,
                                             int groups, const bf16* x, const Surplus& surplus, int lane) {
#pragma unroll
  for (int m = 0; m < 2; ++m) acc[m][0] = acc[m][1] = acc[m][2] = acc[m][3] = 0.0f;
  int here = groups - units.first * kUnitGroups;  // groups from this unit on
#pragma unroll 1
  for (int left = units.count; left > 0; --left) {
    uint4 in[kUnitGroups];
#pragma unroll
    for (int j = 0; j < kUnitGroups; ++j)
      in[j] = *reinterpret_cast<const uint4*>(x + (kWhole ? j : min(j, here - 1)) * 32);
    x += units.step * (kUnitGroups * 32);
    stream.Take();
    const unsigned char* weights = ring + slot * kUnitBytes + lane * 16;
    const unsigned char* scales = ring + slot * kUnitBytes + kUnitWeightBytes + (lane >> 2) * 8;
    if (kWhole || here >= kUnitGroups) {
      MultiplyGroups<kUnitGroups>(acc, weights, scales, in, surplus);
    } else {
#pragma unroll
      for (int j = 0; j < kUnitGroups - 1; ++j) {
        if (j < here)
          MultiplyGroups<1>(acc, weights + j * kGroupBytes, scales + j * kGroupScaleBytes, in + j, surplus);
      }
    }
    here -= units.step * kUnitGroups;
    slot ^= 1;
  }
}

// What the warps' shares of a cell add up to, by rising warp: thread i < 128 gets value (lane i / 4, element
// i % 4) of both halves.
__device__ __forceinline__ void AddWarps(float (&acc)[2][4], float* exchange, int warp, int lane) {
  __syncthreads();
#pragma unroll
  for (int m = 0; m < 2; ++m)
    *reinterpret_cast<float4*>(exchange + (warp * 2 + m) * 128 + lane * 4) =
        make_float4(acc[m][0], acc[m][1], acc[m][2], acc[m][3]);
  __syncthreads();
  if (threadIdx.x < 128) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kMoeWarps; ++w) sum += exchange[(w * 2 + m) * 128 + threadIdx.x];
      acc[m][0] = sum;
    }
  }
}

template <bool kWhole>
class Worker {
 public:
  __device__ __forceinline__ Worker(const MoeParams& p, const Shape& s, Control& control,
                                    const uint16_t* pairs, float* exchange, const unsigned char* ring,
                                    int warp, int lane)
      : p_(p),
        s_(s),
        control_(control),
        pairs_(pairs),
        exchange_(exchange),
        ring_(ring),
        warp_(warp),
        lane_(lane),
        g_(lane >> 2),
        t_(lane & 3),
        done_(DoneCounters(p, control.choice.phase)),
        surplus_(&control.surplus),
        stream_(p, s, control.choice, control.tickets, SharedAddress(ring), warp, lane) {
    stream_.Fill();
  }

  __device__ __forceinline__ void Run() {
    for (int seq = 0;; ++seq) {
      int ticket;
      do {
        ticket = __shfl_sync(~0u, *static_cast<volatile int*>(&control_.tickets[seq % kTicketRing]), 0);
        stream_.Fill();
      } while (ticket >> 20 != (seq & 0x7ff));
      const Item item = MakeItem(s_, p_.mode, control_.choice.active, warp_, ticket & 0xfffff);
      if (item.kind == ItemKind::kEnd) return;
      const bool gate = item.kind == ItemKind::kGateUp;
      if (!gate && was_gate_) {
        __syncthreads();  // the exchange has been read, and serves the products now
        was_gate_ = false;
      }
      const Units units = UnitsOf(s_, item.kind, p_.mode, warp_);
      for (int cell = 0; cell < item.cells; ++cell) {
        const int active = item.active + cell * item.active_step, tile = item.tile + cell * item.tile_step;
        const int begin = control_.choice.begin[active], count = control_.choice.begin[active + 1] - begin;
        if (!gate) WaitForExpert(active);
        for (int first = 0; first < count; first += kColumnsAtOnce)
          Pass(gate, units, active, tile, begin + first, count - first);
        // Four warps finish gate_up's tile; each says so for itself.
        if (gate && warp_ < 4) {
          __syncwarp();
          if (lane_ == 0)
            asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(done_ + active) : "memory");
        }
      }
      if (!gate && p_.mode == DownMode::kDirect) {
        SumExperts(item.tile);
      } else if (!gate && p_.mode == DownMode::kWarp) {
        __syncthreads();  // no warp runs ahead by more than an item, which the ring of tickets relies on
      }
    }
  }

 private:
  __device__ __forceinline__ void WaitForExpert(int active) {
    if (active == ready_) return;
    const unsigned target = static_cast<unsigned>(s_.gate_tiles) * 4;
    while (LoadAcquire(done_ + active) < target) {
    }
    ready_ = active;
    __syncwarp();
  }

  __device__ __forceinline__ void Pass(bool gate, const Units& units, int active, int tile, int begin,
                                       int left) {
    const int hidden = static_cast<int>(p_.w.hidden), inner = static_cast<int>(p_.w.inner);
    // Columns past the last pair repeat it; what they give is not stored.
    const int mine = pairs_[begin + min(g_, left - 1)];
    const bf16* x =
        (gate ? p_.x + mine / p_.top_k * p_.x_stride : p_.activation + static_cast<int64_t>(mine) * inner) +
        8 * t_ + units.first * (kUnitGroups * 32);
    float acc[2][4];
    MultiplyCell<kWhole>(acc, stream_, ring_, slot_, units, gate ? s_.hidden_groups : s_.inner_groups, x,
                         surplus_, lane_);
    if (gate || p_.mode == DownMode::kSplit) {
      AddWarps(acc, exchange_, warp_, lane_);
      const int element = threadIdx.x & 3, from = threadIdx.x >> 2;
      const int row = (from >> 2) + 8 * (element >> 1), column = 2 * (from & 3) + (element & 1);
      if (threadIdx.x >= 128 || column >= left) return;
      const int64_t pair = pairs_[begin + column];
      const float low = acc[0][0], high = acc[1][0];
      if (gate) {
        p_.activation[pair * inner + tile * 16 + row] = __float2bfloat16_rn(low / (1.0f + expf(-low)) * high);
      } else {
        float* to = p_.product + pair * hidden + tile * kUnitRows + row;
        to[0] = low, to[16] = high;
      }
      return;
    }
    const bool direct = p_.mode == DownMode::kDirect;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int column = 2 * t_ + odd;
      if (column >= left) continue;
      const int64_t pair = pairs_[begin + column];
      float* to = direct ? Products() + pair * kUnitRows : p_.product + pair * hidden + tile * kUnitRows;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        to[16 * m + g_] = acc[m][odd];
        to[16 * m + 8 + g_] = acc[m][2 + odd];
      }
    }
  }

  // Two buffers in turn: the barrier between one's writing and reading also lies between the other's reading
  // and next writing.
  __device__ __forceinline__ float* Products() const {
    return exchange_ + flip_ * (kDirectPairs * kUnitRows);
  }

  __device__ __forceinline__ void SumExperts(int tile) {
    const int row = threadIdx.x >> 5, column = tile * kUnitRows + (threadIdx.x & 31);
    const float* from = Products() + (threadIdx.x & 31);
    flip_ ^= 1;
    float sum = 0.0f, before = 0.0f;
    const int64_t at = row * p_.out_stride + column;
    if (p_.accumulate && row < p_.rows) {
      before = p_.out_is_float ? static_cast<float*>(p_.out)[at] : ToFloat(static_cast<bf16*>(p_.out)[at]);
    }
    __syncthreads();
    if (row >= p_.rows) return;
    for (int k = 0; k < p_.top_k; ++k) {
      const int pair = row * p_.top_k + k;
      if (control_.choice.held >> pair & 1)
        sum = fmaf(control_.choice.weights[pair], from[pair * kUnitRows], sum);
    }
    if (p_.accumulate) sum = before + sum;
    if (p_.out_is_float) {
      static_cast<float*>(p_.out)[at] = sum;
    } else {
      static_cast<bf16*>(p_.out)[at] = FromFloat<bf16>(sum);
    }
  }

  const MoeParams& p_;
  const Shape& s_;
  Control& control_;
  const uint16_t* const pairs_;
  float* const exchange_;
  const unsigned char* const ring_;
  const int warp_, lane_, g_, t_;
  unsigned* const done_;
  int slot_ = 0, flip_ = 0, ready_ = -1;
  bool was_gate_ = true;
  const Surplus surplus_;
  Stream<kWhole> stream_;
};

template <bool kWhole>
__global__ void __launch_bounds__(kMoeThreads, 1) MoeKernel(const __grid_constant__ MoeParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  float* const exchange = reinterpret_cast<float*>(shared + kRingBytes);
  Control& control = *reinterpret_cast<Control*>(shared + kRingBytes + kExchangeBytes);
  uint16_t* const pairs = reinterpret_cast<uint16_t*>(&control + 1);
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int count = p.rows * p.top_k;
  LaunchDependents();
  // The first entry is written by another thread, with no barrier between.
  if (threadIdx.x > 0 && threadIdx.x < kTicketRing) control.tickets[threadIdx.x] = -1;
  if (threadIdx.x == 0) control.surplus = make_uint4(kSurplus, kSurplus, kSurplus, kSurplus);
  WaitForPrevious();
  // All of this is on its way at once: the first ticket, the choice and its weights.
  unsigned ticket = 0;
  if (threadIdx.x == kMoeThreads - 1) ticket = atomicAdd(p.state, 1u);
  if (p.mode == DownMode::kDirect && threadIdx.x >= 64 &&
      threadIdx.x - 64 < count)  // the first two warps have the ids
    control.choice.weights[threadIdx.x - 64] = p.weights[threadIdx.x - 64];
  MakeChoice(control.choice, pairs, reinterpret_cast<int*>(exchange), p.ids, count,
             static_cast<int>(p.w.first_expert), static_cast<int>(p.w.experts));
  if (threadIdx.x == kMoeThreads - 1) {
    control.tickets[0] = static_cast<int>(ticket & ~kPhaseBit);
    control.choice.phase = ticket & kPhaseBit;
  }
  __syncthreads();
  const int active = control.choice.active;
  const Shape s(p, active);
  // The other set of counters is for the next launch; the launch that used it has ended.
  if (blockIdx.x == 0) {
    unsigned* const other = DoneCounters(p, control.choice.phase ^ kPhaseBit);
    for (int i = threadIdx.x; i < kMaxExperts; i += kMoeThreads) other[i] = 0;
  }
  if (threadIdx.x == 0) ResetAfterLast(p, s, control.choice, control.tickets[0]);
  if (active == 0) {
    if (p.mode == DownMode::kDirect && !p.accumulate) {
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
  Worker<kWhole> worker(p, s, control, pairs, exchange, shared + warp * kStreamSlots * kUnitBytes, warp,
                        lane);
  worker.Run();
}

template <typename T>
__global__ void SumKernel(const __grid_constant__ MoeParams p) {
  const int64_t i = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  WaitForPrevious();
  LaunchDependents();
  if (i >= p.w.hidden) return;
  T* out = static_cast<T*>(p.out) + blockIdx.x * p.out_stride + i;
  float sum = 0.0f;
#pragma unroll 8
  for (int k = 0; k < p.top_k; ++k) {
    const int pair = blockIdx.x * p.top_k + k;
    const int64_t expert = p.ids[pair] - p.w.first_expert;
    if (expert >= 0 && expert < p.w.experts)
      sum = fmaf(p.weights[pair], p.product[pair * p.w.hidden + i], sum);
  }
  *out = FromFloat<T>(p.accumulate ? ToFloat(*out) + sum : sum);
}

}  // namespace

cudaError_t Moe(const Launch& launch, const kernels::MoeArgs& args) {
  const kernels::Int4Experts& w = args.weights;
  if (args.x.rows == 0 || w.experts == 0) return cudaSuccess;
  const bool fits = args.x.dtype == kernels::DType::kBF16 && args.x.stride % 8 == 0 &&
                    w.experts <= kMaxExperts && w.hidden % kernels::kInt4Group == 0 &&
                    w.inner % kernels::kInt4Group == 0 && args.top_k > 0 && args.top_k <= 64 &&
                    MoeWorkspace(args.x.rows, args.top_k, w.inner, w.hidden) <= launch.workspace_bytes;
  if (!fits) return cudaErrorInvalidValue;
  MoeParams p;
  p.x_stride = args.x.stride;
  p.w = w;
  p.top_k = static_cast<int>(args.top_k);
  p.out_is_float = args.out.dtype == kernels::DType::kF32;
  p.out_stride = args.out.stride;
  p.accumulate = args.accumulate;
  p.state = launch.counters + kCounters;
  const int64_t at_once = kMaxPairs / args.top_k;
  for (int64_t first = 0; first < args.x.rows; first += at_once) {
    p.rows = static_cast<int>(std::min(at_once, args.x.rows - first));
    const int64_t pairs = p.rows * args.top_k;
    const kernels::Tensor x = args.x.Rows(first, p.rows), out = args.out.Rows(first, p.rows);
    p.x = Data<bf16>(x);
    p.out = out.data;
    p.ids = args.expert_ids + first * args.top_k;
    p.weights = args.expert_weights + first * args.top_k;
    p.mode = w.inner >= kMoeWarps * kUnitGroups * 32          ? DownMode::kSplit
             : p.rows <= kDirectRows && pairs <= kDirectPairs ? DownMode::kDirect
                                                              : DownMode::kWarp;
    p.product = static_cast<float*>(launch.workspace);
    p.activation = reinterpret_cast<bf16*>(p.product + pairs * w.hidden);
    const bool whole = w.hidden % (kUnitGroups * 32) == 0 && w.inner % (kUnitGroups * 32) == 0;
    const cudaError_t error =
        LaunchAfter(launch, whole ? MoeKernel<true> : MoeKernel<false>, dim3(launch.processors), kMoeThreads,
                    MoeSharedBytes(static_cast<int>(pairs)), p);
    if (error != cudaSuccess) return error;
    if (p.mode == DownMode::kDirect) continue;
    const dim3 sum(p.rows, Blocks(w.hidden, 256));
    const cudaError_t summed = p.out_is_float ? LaunchAfter(launch, SumKernel<float>, sum, 256, 0, p)
                                              : LaunchAfter(launch, SumKernel<bf16>, sum, 256, 0, p);
    if (summed != cudaSuccess) return summed;
  }
  return cudaSuccess;
}

size_t MoeWorkspace(int64_t rows, int64_t top_k, int64_t inner, int64_t hidden) {
  const int64_t pairs = std::min<int64_t>(rows * top_k, kMaxPairs);
  return static_cast<size_t>(pairs) * (hidden * 4 + inner * 2);
}

}  // namespace kdt::cuda
