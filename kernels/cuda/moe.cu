// Routed experts: one kernel of persistent blocks for gate_up, silu and down (moe/schedule.cuh: the order of
// work; moe/int4.cuh: the products), and for more than a few rows a second one that sums over experts.
// Weights of an expert are read once for up to 16 of its rows.
#include <algorithm>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/moe/schedule.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

#ifndef KDT_MOE_BLOCKS
#define KDT_MOE_BLOCKS 1
#endif
#ifndef KDT_MOE_DIRECT_ROWS
#define KDT_MOE_DIRECT_ROWS 8
#endif
constexpr int kDirectRows = KDT_MOE_DIRECT_ROWS;  // at most 8 (and 64 pairs) for DownMode::kDirect
constexpr int kExchangeBytes = 16384;
constexpr int kMaxPairs = 8192;  // of a launch
constexpr int kFewPairs = 2048;  // that leave room for a fourth slot

// Dynamic shared memory: the rings, the exchange, then these and the list of pairs.
struct Control {
  uint4 surplus;
  Choice choice;
  int tickets[kTicketRing];
};
template <int kSlots>
constexpr int kRingBytes = kMoeWarps* kSlots* kUnitBytes;
constexpr int MoeSharedBytes(int slots, int pairs) {
  return kMoeWarps * slots * kUnitBytes + kExchangeBytes + static_cast<int>(sizeof(Control)) +
         (pairs * 2 + 15) / 16 * 16;
}
static_assert(MoeSharedBytes(4, kFewPairs) <= 101376 && MoeSharedBytes(3, kMaxPairs) <= 101376);

__device__ __forceinline__ unsigned LoadAcquire(const unsigned* from) {
  unsigned v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

// One warp's share of a cell for one pass: acc = W x over its units. x are the columns at inputs 8 t of the
// first unit.
template <int kColumns, int kSlots, bool kWhole>
__device__ __forceinline__ void MultiplyCell(float (&acc)[kColumns][2][4], Stream<kSlots, kWhole>& stream,
                                             const unsigned char* ring, int& slot, const Units& units,
                                             int groups, const bf16* (&x)[kColumns], const Surplus& surplus,
                                             int lane) {
  uint4 next[kUnitGroups][kColumns];
  int here = groups - units.first * kUnitGroups;  // groups from this unit on
  const auto load = [&](int left) {
#pragma unroll
    for (int j = 0; j < kUnitGroups; ++j) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
        next[j][n] = *reinterpret_cast<const uint4*>(x[n] + (kWhole ? j : min(j, left - 1)) * 32);
    }
#pragma unroll
    for (int n = 0; n < kColumns; ++n) x[n] += units.step * (kUnitGroups * 32);
  };
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
#pragma unroll
    for (int m = 0; m < 2; ++m) acc[n][m][0] = acc[n][m][1] = acc[n][m][2] = acc[n][m][3] = 0.0f;
  }
  if (units.count > 0) load(here);
#pragma unroll 1
  for (int left = units.count; left > 0; --left) {
    uint4 now[kUnitGroups][kColumns];
#pragma unroll
    for (int j = 0; j < kUnitGroups; ++j) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) now[j][n] = next[j][n];
    }
    stream.Take();
    if (left > 1) load(here - units.step * kUnitGroups);
    const unsigned char* weights = ring + slot * kUnitBytes + lane * 16;
    const unsigned char* scales = ring + slot * kUnitBytes + kUnitWeightBytes + (lane >> 2) * 8;
    if (kWhole || here >= kUnitGroups) {
      MultiplyGroups<kUnitGroups, kColumns>(acc, weights, scales, now, surplus);
    } else {
#pragma unroll
      for (int j = 0; j < kUnitGroups - 1; ++j) {
        if (j < here)
          MultiplyGroups<1, kColumns>(acc, weights + j * kGroupBytes, scales + j * kGroupScaleBytes, now + j,
                                      surplus);
      }
    }
    here -= units.step * kUnitGroups;
    slot = slot + 1 == kSlots ? 0 : slot + 1;
  }
}

// What the warps' shares of a cell add up to, by rising warp. Thread i < 128 gets value (lane i / 4, element
// i % 4) of both halves. `flip` chooses one of two buffers where a buffer holds one batch of columns; the
// barrier between a buffer's write and its reading also lies between the other buffer's reading and its next
// write.
template <int kColumns>
__device__ __forceinline__ void AddWarps(float (&acc)[kColumns][2][4], float* exchange, int& flip, int warp,
                                         int lane) {
  float* const buffer = exchange + (kColumns == 1 ? flip * (kExchangeBytes / 8) : 0);
  flip ^= 1;
  if (kColumns > 1) __syncthreads();
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
      *reinterpret_cast<float4*>(buffer + ((n * kMoeWarps + warp) * 2 + m) * 128 + lane * 4) =
          make_float4(acc[n][m][0], acc[n][m][1], acc[n][m][2], acc[n][m][3]);
  }
  __syncthreads();
  if (threadIdx.x < 128) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kMoeWarps; ++w) sum += buffer[((n * kMoeWarps + w) * 2 + m) * 128 + threadIdx.x];
        acc[n][m][0] = sum;
      }
    }
  }
  if (kColumns > 1) __syncthreads();
}

template <int kSlots, bool kWhole>
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
      const Units units = UnitsOf(s_, item.kind, p_.mode, warp_);
      for (int cell = 0; cell < item.cells; ++cell) {
        const int active = item.active + cell * item.active_step, tile = item.tile + cell * item.tile_step;
        const int begin = control_.choice.begin[active], count = control_.choice.begin[active + 1] - begin;
        if (!gate) WaitForExpert(active);
        for (int first = 0; first < count;) {
          if (count - first > 8) {
            Pass<2>(gate, units, active, tile, begin + first, count - first);
            first += 16;
          } else {
            Pass<1>(gate, units, active, tile, begin + first, count - first);
            first += 8;
          }
        }
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

  template <int kColumns>
  __device__ __forceinline__ void Pass(bool gate, const Units& units, int active, int tile, int begin,
                                       int left) {
    const int hidden = static_cast<int>(p_.w.hidden), inner = static_cast<int>(p_.w.inner);
    const bf16* x[kColumns];
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      // Columns past the last pair repeat it; what they give is not stored.
      const int pair = pairs_[begin + min(8 * n + g_, left - 1)];
      x[n] =
          (gate ? p_.x + pair / p_.top_k * p_.x_stride : p_.activation + static_cast<int64_t>(pair) * inner) +
          8 * t_ + units.first * (kUnitGroups * 32);
    }
    float acc[kColumns][2][4];
    MultiplyCell<kColumns, kSlots, kWhole>(acc, stream_, ring_, slot_, units,
                                           gate ? s_.hidden_groups : s_.inner_groups, x, surplus_, lane_);
    if (gate || p_.mode == DownMode::kSplit) {
      AddWarps<kColumns>(acc, exchange_, flip_, warp_, lane_);
      if (threadIdx.x >= 128) return;
      const int element = threadIdx.x & 3, from = threadIdx.x >> 2;
      const int row = (from >> 2) + 8 * (element >> 1), column = 2 * (from & 3) + (element & 1);
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        if (8 * n + column >= left) break;
        const int64_t pair = pairs_[begin + 8 * n + column];
        const float low = acc[n][0][0], high = acc[n][1][0];
        if (gate) {
          p_.activation[pair * inner + tile * 16 + row] =
              __float2bfloat16_rn(low / (1.0f + expf(-low)) * high);
        } else {
          float* to = p_.product + pair * hidden + tile * kUnitRows + row;
          to[0] = low, to[16] = high;
        }
      }
      return;
    }
    const bool direct = p_.mode == DownMode::kDirect;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int column = 8 * n + 2 * t_ + odd;
        if (column >= left) continue;
        const int64_t pair = pairs_[begin + column];
        float* to = direct ? exchange_ + flip_ * (kExchangeBytes / 8) + pair * kUnitRows
                           : p_.product + pair * hidden + tile * kUnitRows;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          to[16 * m + g_] = acc[n][m][odd];
          to[16 * m + 8 + g_] = acc[n][m][2 + odd];
        }
      }
    }
  }

  __device__ __forceinline__ void SumExperts(int tile) {
    const int row = threadIdx.x >> 5, column = tile * kUnitRows + (threadIdx.x & 31);
    const float* from = exchange_ + flip_ * (kExchangeBytes / 8) + (threadIdx.x & 31);
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
  const Surplus surplus_;
  Stream<kSlots, kWhole> stream_;
};

template <int kSlots, bool kWhole>
__global__ void __launch_bounds__(kMoeThreads, KDT_MOE_BLOCKS)
    MoeKernel(const __grid_constant__ MoeParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  float* const exchange = reinterpret_cast<float*>(shared + kRingBytes<kSlots>);
  Control& control = *reinterpret_cast<Control*>(shared + kRingBytes<kSlots> + kExchangeBytes);
  uint16_t* const pairs = reinterpret_cast<uint16_t*>(&control + 1);
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int count = p.rows * p.top_k;
  LaunchDependents();
  if (threadIdx.x < kTicketRing) control.tickets[threadIdx.x] = -1;
  if (threadIdx.x == 0) control.surplus = make_uint4(kSurplus, kSurplus, kSurplus, kSurplus);
  WaitForPrevious();
  // All of this is on its way at once: the first ticket, the choice and its weights.
  unsigned ticket = 0;
  if (threadIdx.x == kMoeThreads - 1) ticket = atomicAdd(p.state, 1u);
  if (p.mode == DownMode::kDirect && threadIdx.x >= 64 && threadIdx.x - 64 < count)
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
  Worker<kSlots, kWhole> worker(p, s, control, pairs, exchange, shared + warp * kSlots * kUnitBytes, warp,
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

template <int kSlots, bool kWhole>
cudaError_t LaunchMoe(const Launch& launch, const MoeParams& p) {
  return LaunchAfter(launch, MoeKernel<kSlots, kWhole>, dim3(launch.processors * KDT_MOE_BLOCKS), kMoeThreads,
                     MoeSharedBytes(kSlots, p.rows * p.top_k), p);
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
    p.mode = w.inner >= kMoeWarps * kUnitGroups * 32 ? DownMode::kSplit
             : p.rows <= kDirectRows && pairs <= 64  ? DownMode::kDirect
                                                     : DownMode::kWarp;
    p.product = static_cast<float*>(launch.workspace);
    p.activation = reinterpret_cast<bf16*>(p.product + pairs * w.hidden);
    const bool whole = w.hidden % (kUnitGroups * 32) == 0 && w.inner % (kUnitGroups * 32) == 0;
    const cudaError_t error = !whole               ? LaunchMoe<3, false>(launch, p)
                              : pairs <= kFewPairs ? LaunchMoe<4, true>(launch, p)
                                                   : LaunchMoe<3, true>(launch, p);
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
