// Routed experts: one kernel of persistent blocks for gate_up, silu and down (moe/schedule.cuh: the order of
// work; moe/int4.cuh: the products), and for more than a few rows a second one that sums over experts.
// Each warp streams its weights through its own ring in shared memory, a step ahead of its products, across
// the borders of tiles, experts and phases. Weights of an expert are read once for up to eight of its rows,
// and again, mostly out of L2, for each further eight.
#include <algorithm>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/moe/schedule.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

constexpr int kDirectRows = 4, kDirectPairs = 64;  // the most for MoeParams::direct
constexpr int kAllSlicesRows = 2;                  // up to these a team is a whole block
constexpr int kMaxPairs = 2880;                    // of a launch
constexpr int kSumFloats = 256;                    // of a warp for a tile
static_assert(kDirectRows <= kDirectTeam);

// What a warp needs now and then, for which there are no registers.
struct WarpState {
  Runs runs;         // the same for all
  Cell next;         // of down: whose weights are under way
  int item, expert;  // with direct: the tile of the team, the next expert of the warp
};

// Dynamic shared memory: this and the list of pairs.
struct Shared {
  unsigned char rings[kMoeWarps][2 * kSlotBytes];
  union {
    float exchange[kMoeWarps][kSumFloats];  // sums of gate_up's tiles; before that, MakeChoice's counts
    float products[kDirectTeams][kDirectPairs * kTileRows];  // later, with direct
  };
  uint4 surplus;
  uint64_t landed[kMoeWarps][2];               // barriers of the rings' slots
  uint64_t full[kMaxTeams], empty[kMaxTeams];  // barriers of the exchange
  uint64_t drawn[kMaxTeams][kTickets];         // and of the tickets
  unsigned tickets[kMaxTeams][kTickets];
  unsigned phase;
  WarpState warps[kMoeWarps];
  Choice choice;
};
static_assert(sizeof(Shared) % 16 == 0 && kMaxExperts * 4 <= sizeof(Shared::exchange));
constexpr int MoeSharedBytes(int pairs) {
  return static_cast<int>(sizeof(Shared)) + (pairs * 2 + 15) / 16 * 16;
}
static_assert(MoeSharedBytes(kMaxPairs) <= 101376);

__device__ __forceinline__ unsigned LoadAcquire(const unsigned* from) {
  unsigned v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
// kAll: every step has all its groups.
template <bool kAll>
class Worker {
 public:
  __device__ __forceinline__ Worker(const MoeParams& p, Shared& shared, const uint16_t* pairs, int warp,
                                    int lane)
      : p_(p),
        shared_(shared),
        pairs_(pairs),
        warp_(warp),
        lane_(lane),
        g_(lane >> 2),
        t_(lane & 3),
        team_(warp / p.team_warps),
        member_(warp % p.team_warps),
        surplus_(&shared.surplus),
        ring_(SharedAddress(shared.rings[warp])) {}

  __device__ __forceinline__ void Run() {
    if (lane_ == 0) {
      state().runs.Plan(p_, choice());
      state().item = static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) * (warp_ / kDirectTeam);
      state().expert = warp_ % kDirectTeam;
    }
    __syncwarp();
    unsigned ticket = shared_.tickets[team_][kTickets - 1];
    const unsigned end = GateItems(p_, choice());
    first_group_ = member_ * p_.slices_each * p_.slice_groups;
    if (ticket < end) {
      at_ = GatePosition(ticket);
      SendFirst(true, at_, GateGroups(first_group_, p_.slice_groups));
      SendSecond(true, at_, GateGroups(first_group_, p_.slice_groups));
    } else {
      if (!p_.direct) DrawDown();
      const bool more = NextCell(at_);
      SendFirst(more, at_, min(kStep, p_.inner_groups));
      SendSecond(more, at_, min(kStep, p_.inner_groups));
    }
    int round = 0;
    for (unsigned seq = 0; ticket < end; ++seq) ticket = GateTile(ticket, seq, round);
    Down();
  }

 private:
  __device__ __forceinline__ bool Draws() const { return member_ == p_.team_warps - 1 && lane_ == 0; }
  __device__ __forceinline__ unsigned* Done() const { return DoneCounters(p_, shared_.phase); }
  __device__ __forceinline__ WarpState& state() const { return shared_.warps[warp_]; }
  __device__ __forceinline__ const Runs& runs() const { return state().runs; }
  __device__ __forceinline__ const Choice& choice() const { return shared_.choice; }
  __device__ __forceinline__ Position PositionOf(bool gate, int active, int tile, int group) const {
    const int tiles = gate ? p_.gate_tiles : p_.down_tiles,
              groups = gate ? p_.hidden_groups : p_.inner_groups;
    const int64_t at = (static_cast<int64_t>(choice().expert[active]) * tiles + tile) * groups + group;
    return {reinterpret_cast<const char*>(gate ? p_.w.gate_up : p_.w.down) + at * kGroupBytes + lane_ * 16,
            reinterpret_cast<const char*>(gate ? p_.w.gate_up_scale : p_.w.down_scale) +
                at * kGroupScaleBytes + lane_ * 16};
  }
  __device__ __forceinline__ Position GatePosition(unsigned ticket) const {
    return PositionOf(true, static_cast<int>(ticket) / p_.gate_tiles,
                      static_cast<int>(ticket) % p_.gate_tiles, first_group_);
  }
  __device__ __forceinline__ Position DownPosition(const Cell& cell) const {
    return PositionOf(false, cell.active, cell.tile, 0);
  }
  // Groups of a step that starts at `group` of gate_up's inputs with `left` to go in its slice.
  __device__ __forceinline__ int GateGroups(int group, int left) const {
    if (kAll) return kGateStep;
    return max(0, min(min(left, kStep), p_.hidden_groups - group));
  }

  // What a step needs, in two parts: four groups, and what is left.
  __device__ __forceinline__ void SendFirst(bool more, const Position& from, int groups) {
    if (!more) return;
    SendGroups<4, kAll>(ring_, from, groups, lane_);
    CopyAsyncArrive(SharedAddress(&shared_.landed[warp_][0]));
  }
  __device__ __forceinline__ void SendSecond(bool more, const Position& from, int groups) {
    if (!more) return;
    SendGroups<3, kAll>(ring_ + kSlotBytes, from.Groups(4), groups - 4, lane_);
    CopyAsyncArrive(SharedAddress(&shared_.landed[warp_][1]));
  }
  // The older of the two parts under way; what follows may be sent to its place.
  template <int kGroups>
  __device__ __forceinline__ void Take(Weights& weights, int slot) {
    BarrierWait(SharedAddress(&shared_.landed[warp_][slot]), parity_);
    weights.Take<kGroups>(ring_ + slot * kSlotBytes, lane_);
    __syncwarp();
  }
  // A step: products of what has come, and sending for the next.
  template <int kGroups>
  __device__ __forceinline__ void Step(float (&acc)[2][4], const bf16* x, int groups, bool more,
                                       const Position& next, int next_groups) {
    Weights weights;
    Inputs inputs;
    if (kAll) inputs.Load<4, true>(x, groups);
    Take<4>(weights, 0);
    if (!kAll) inputs.Load<4, false>(x, groups);  // there are no registers for it before
    SendFirst(more, next, next_groups);
    Multiply<4>(acc, weights, inputs, surplus_);
    if (kAll) inputs.Load<kGroups - 4, true>(x + 4 * 32, groups - 4);
    Take<kGroups - 4>(weights, 1);
    if (!kAll) inputs.Load<kGroups - 4, false>(x + 4 * 32, groups - 4);
    parity_ ^= 1;
    SendSecond(more, next, next_groups);
    Multiply<kGroups - 4>(acc, weights, inputs, surplus_);
  }
  // One tile of gate_up; returns the next ticket.
  __device__ __forceinline__ unsigned GateTile(unsigned ticket, unsigned seq, int& round) {
    const unsigned end = GateItems(p_, choice());
    const int active = static_cast<int>(ticket) / p_.gate_tiles,
              tile = static_cast<int>(ticket) % p_.gate_tiles;
    const int begin = choice().begin[active], count = choice().begin[active + 1] - begin;
    unsigned next_ticket = 0;
    for (int first = 0; first < count; first += kColumnsAtOnce, ++round) {
      const bool last_pass = first + kColumnsAtOnce >= count;
      // Columns past the last pair repeat it; what they give is not stored.
      const int columns = min(count - first, kColumnsAtOnce);
      const int mine = pairs_[begin + first + min(g_, columns - 1)];
      const bf16* x = p_.x + mine / p_.top_k * p_.x_stride + first_group_ * 32 + 8 * t_;
      float4* const mine_sums = reinterpret_cast<float4*>(shared_.exchange[warp_]) + lane_;
      int group = first_group_, left = p_.slices_each * p_.slice_steps;
#pragma unroll 1
      for (int slice = 0; slice < p_.slices_each; ++slice) {
        const bool last_slice = slice == p_.slices_each - 1;
        float acc[2][4] = {};
        int slice_left = p_.slice_groups;
#pragma unroll 1
        for (int step = p_.slice_steps; step > 0; --step) {
          if (last_pass && left == p_.draw_at && Draws()) DrawTicket(drawn_, p_.state);
          if (last_pass && left == p_.take_at) next_ticket = TakeTicket(seq);
          --left;
          const int groups = GateGroups(group, slice_left);
          group += groups, slice_left -= groups;
          bool more = true;
          Position next = at_.Groups(groups);
          int next_groups = GateGroups(group, step > 1 ? slice_left : p_.slice_groups);
          if (step == 1 && last_slice) {
            if (!last_pass) {
              next = GatePosition(ticket);
              next_groups = GateGroups(first_group_, p_.slice_groups);
            } else if (next_ticket < end) {
              next = GatePosition(next_ticket);
              next_groups = GateGroups(first_group_, p_.slice_groups);
            } else {
              more = NextCell(next);
              next_groups = min(kStep, p_.inner_groups);
            }
          }
          Step<kAll ? kGateStep : kStep>(acc, x, groups, more, next, next_groups);
          at_ = next;
          x += groups * 32;
        }
        if (slice == 0) {
          if (round > 0) BarrierWait(SharedAddress(&shared_.empty[team_]), (round - 1) & 1);
        } else {
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            const float4 before = mine_sums[m * 32];
            acc[m][0] = before.x + acc[m][0], acc[m][1] = before.y + acc[m][1];
            acc[m][2] = before.z + acc[m][2], acc[m][3] = before.w + acc[m][3];
          }
        }
#pragma unroll
        for (int m = 0; m < 2; ++m)
          mine_sums[m * 32] = make_float4(acc[m][0], acc[m][1], acc[m][2], acc[m][3]);
      }
      __syncwarp();
      if (lane_ == 0) BarrierArrive(SharedAddress(&shared_.full[team_]));
      if (round % p_.team_warps == member_) FinishGate(round, active, tile, begin + first, columns);
    }
    return next_ticket;
  }

  // The team's next ticket, which its last warp has drawn.
  __device__ __forceinline__ unsigned TakeTicket(unsigned seq) {
    const uint32_t barrier = SharedAddress(&shared_.drawn[team_][seq % kTickets]);
    if (Draws()) {
      const unsigned drawn = drawn_ & ~kPhaseBit;
      ResetAfterLast(p_, choice(), shared_.phase, drawn);
      shared_.tickets[team_][seq % kTickets] = drawn;
      BarrierArrive(barrier);
    }
    __syncwarp();
    BarrierWait(barrier, seq / kTickets & 1);
    const unsigned next = shared_.tickets[team_][seq % kTickets];
    if (next >= GateItems(p_, choice()) && !p_.direct) DrawDown();
    return next;
  }

  // One warp of the team adds up and writes the activations.
  __device__ __forceinline__ void FinishGate(int round, int active, int tile, int begin, int columns) {
    BarrierWait(SharedAddress(&shared_.full[team_]), round & 1);
    const uint32_t from = SharedAddress(shared_.exchange[team_ * p_.team_warps]) + lane_ * 16;
    float sum[2][4] = {}, part[2][4];
    for (int w = 0; w < p_.team_warps;) {
#pragma unroll
      for (int m = 0; m < 2; ++m) LoadSums(part[m], from + (w * 2 + m) * 512);
      ++w;
      if (p_.slices_each == 1) {
#pragma unroll
        for (int i = 1; i < kSlicesEach; ++i, ++w) {
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            float more[4];
            LoadSums(more, from + (w * 2 + m) * 512);
#pragma unroll
            for (int e = 0; e < 4; ++e) part[m][e] += more[e];
          }
        }
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[m][e] += part[m][e];
      }
    }
    const int inner = static_cast<int>(p_.w.inner);
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int column = 2 * t_ + odd;
      if (column >= columns) continue;
      bf16* const to = p_.activation + pairs_[begin + column] * inner + tile * 16 + g_;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = sum[0][2 * half + odd] * kUnscale, high = sum[1][2 * half + odd] * kUnscale;
        to[8 * half] = __float2bfloat16_rn(low / (1.0f + expf(-low)) * high);
      }
    }
    __syncwarp();
    if (lane_ == 0) {
      BarrierArrive(SharedAddress(&shared_.empty[team_]));
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(Done() + active) : "memory");
    }
  }
  __device__ __forceinline__ static void LoadSums(float (&to)[4], uint32_t from) {
    const float4 v = LoadShared4(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }

  __device__ __forceinline__ void DrawDown() {
    if (lane_ == 0) DrawTicket(drawn_, Done() + kMaxExperts);
  }
  // What the warp does next in down, and where that begins; false at the end.
  __device__ __forceinline__ bool NextCell(Position& at) {
    Cell next;
    if (p_.direct) {
      int item = state().item, expert = state().expert;
      if (expert < choice().active && item < p_.down_tiles) {
        next = {expert, item, 1};
        expert += kDirectTeam;
        if (expert >= choice().active) {
          item += static_cast<int>(gridDim.x) * kDirectTeams;
          expert = warp_ % kDirectTeam;
        }
        if (lane_ == 0) state().item = item, state().expert = expert;
      }
    } else {
      const int ticket = static_cast<int>(__shfl_sync(~0u, drawn_, 0));
      next.active = ticket / runs().each;
      next.tile = ticket % runs().each * runs().tiles;
      next.tiles = next.active < choice().active ? min(runs().tiles, p_.down_tiles - next.tile) : 0;
    }
    __syncwarp();
    if (lane_ == 0) state().next = next;
    __syncwarp();
    if (next.tiles == 0) return false;
    at = DownPosition(next);
    return true;
  }

  __device__ __forceinline__ void Down() {
    const int hidden = static_cast<int>(p_.w.hidden), inner = static_cast<int>(p_.w.inner);
    const int steps = (p_.inner_groups + kStep - 1) / kStep;
    if (p_.direct) __syncthreads();              // the exchange becomes the products
    if (p_.direct && state().next.tiles == 0) {  // more warps than experts
      for (int item = state().item; item < p_.down_tiles; item += static_cast<int>(gridDim.x) * kDirectTeams)
        SumExperts(item);
    }
    while (state().next.tiles > 0) {
      const Cell cell = state().next;
      const int begin = choice().begin[cell.active], count = choice().begin[cell.active + 1] - begin;
      if (!p_.direct) DrawDown();
      WaitForExpert(cell.active, count);
      for (int first = 0; first < count; first += kColumnsAtOnce) {
        const bool last_pass = first + kColumnsAtOnce >= count;
        const int left = min(count - first, kColumnsAtOnce);
        const int mine = pairs_[begin + first + min(g_, left - 1)];
        const bf16* const inputs = p_.activation + mine * inner + 8 * t_;
        int to[2];  // where the lane's two columns go
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const int column = 2 * t_ + odd;
          to[odd] = column < left ? pairs_[begin + first + column] * (p_.direct ? kTileRows : hidden) : -1;
        }
#pragma unroll 1
        for (int tile = 0; tile < cell.tiles; ++tile) {
          float acc[2][4] = {};
          const bf16* x = inputs;
          int groups_left = p_.inner_groups;
#pragma unroll 1
          for (int step = steps; step > 0; --step) {
            const int groups = kAll ? kStep : min(kStep, groups_left);
            groups_left -= groups;
            Position next = at_.Groups(groups);
            const int next_groups = kAll ? kStep : min(kStep, step > 1 ? groups_left : p_.inner_groups);
            bool more = true;
            if (step == 1 && tile == cell.tiles - 1) {
              if (!last_pass) {
                next = DownPosition(cell);
              } else {
                more = NextCell(next);
              }
            }
            Step<kStep>(acc, x, groups, more, next, next_groups);
            at_ = next;
            x += kStep * 32;
          }
          float* const products = p_.direct ? shared_.products[warp_ / kDirectTeam] + g_
                                            : p_.product + (cell.tile + tile) * kTileRows + g_;
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            if (to[odd] < 0) continue;
#pragma unroll
            for (int m = 0; m < 2; ++m) {
              products[to[odd] + 16 * m] = acc[m][odd] * kUnscale;
              products[to[odd] + 16 * m + 8] = acc[m][2 + odd] * kUnscale;
            }
          }
        }
      }
      if (p_.direct && (state().next.tiles == 0 || state().next.tile != cell.tile)) SumExperts(cell.tile);
    }
  }

  __device__ __forceinline__ void WaitForExpert(int active, int rows) {
    if (active == ready_) return;
    const unsigned target =
        static_cast<unsigned>(p_.gate_tiles * ((rows + kColumnsAtOnce - 1) / kColumnsAtOnce));
    while (LoadAcquire(Done() + active) < target) {
    }
    ready_ = active;
    __syncwarp();
  }

  // The warps of a kDirectTeam have made all products of a tile: a warp a row, a lane a column.
  __device__ __forceinline__ void SumExperts(int tile) {
    const int row = warp_ % kDirectTeam, column = tile * kTileRows + lane_;
    const float* const from = shared_.products[warp_ / kDirectTeam] + lane_;
    float sum = 0.0f, before = 0.0f;
    const int64_t at = row * p_.out_stride + column;
    if (p_.accumulate && row < p_.rows)
      before = p_.out_is_float ? static_cast<float*>(p_.out)[at] : ToFloat(static_cast<bf16*>(p_.out)[at]);
    NamedBarrier(1 + warp_ / kDirectTeam, kDirectTeam * 32);
    if (row < p_.rows) {
      for (int k = 0; k < p_.top_k; ++k) {
        const int pair = row * p_.top_k + k;
        if (choice().held >> pair & 1) sum = fmaf(choice().weights[pair], from[pair * kTileRows], sum);
      }
      if (p_.accumulate) sum = before + sum;
      if (p_.out_is_float) {
        static_cast<float*>(p_.out)[at] = sum;
      } else {
        static_cast<bf16*>(p_.out)[at] = FromFloat<bf16>(sum);
      }
    }
    NamedBarrier(1 + warp_ / kDirectTeam, kDirectTeam * 32);  // the products have been read
  }

  const MoeParams& p_;
  Shared& shared_;
  const uint16_t* const pairs_;
  const int warp_, lane_, g_, t_, team_, member_;
  const Surplus surplus_;
  int first_group_;
  const uint32_t ring_;
  int parity_ = 0;      // of the barriers of the ring
  Position at_;         // of the step under way
  unsigned drawn_ = 0;  // the ticket under way: the team's in its last warp, then in each warp its own
  int ready_ = -1;
};

template <bool kAll>
__global__ void __launch_bounds__(kMoeThreads, 1) MoeKernel(const __grid_constant__ MoeParams p) {
  extern __shared__ __align__(128) unsigned char dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  uint16_t* const pairs = reinterpret_cast<uint16_t*>(&shared + 1);
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int count = p.rows * p.top_k, team_warps = p.team_warps;
  LaunchDependents();
  if (threadIdx.x < kMaxTeams) {
    BarrierInit(SharedAddress(&shared.full[threadIdx.x]), team_warps);
    BarrierInit(SharedAddress(&shared.empty[threadIdx.x]), 1);
    for (int i = 0; i < kTickets; ++i) BarrierInit(SharedAddress(&shared.drawn[threadIdx.x][i]), 1);
  }
  if (threadIdx.x < 2 * kMoeWarps) BarrierInit(SharedAddress(&shared.landed[0][threadIdx.x]), 32);
  if (threadIdx.x == 0) shared.surplus = make_uint4(kSurplusLow, kSurplusLow, kSurplusHigh, kSurplusHigh);
  PrepareChoice(reinterpret_cast<int*>(shared.exchange));
  __syncthreads();
  WaitForPrevious();
  // All of this is on its way at once: the first tickets, the choice and its weights.
  const bool draws = lane == 0 && warp % team_warps == team_warps - 1;
  unsigned ticket = 0;
  if (draws) DrawTicket(ticket, p.state);
  if (p.direct && threadIdx.x >= 64 && threadIdx.x - 64 < count)  // the first two warps have the ids
    shared.choice.weights[threadIdx.x - 64] = p.weights[threadIdx.x - 64];
  MakeChoice(shared.choice, pairs, reinterpret_cast<int*>(shared.exchange), p.ids, count,
             static_cast<int>(p.w.first_expert), static_cast<int>(p.w.experts));
  if (draws) {
    shared.tickets[warp / team_warps][kTickets - 1] = ticket & ~kPhaseBit;
    if (warp == kMoeWarps - 1) shared.phase = ticket & kPhaseBit;
  }
  __syncthreads();
  const int active = shared.choice.active;
  // The other set of words is for the next launch; the launch that used it has ended.
  if (blockIdx.x == 0) {
    unsigned* const other = DoneCounters(p, shared.phase ^ kPhaseBit);
    for (int i = threadIdx.x; i < kPhaseWords; i += kMoeThreads) other[i] = 0;
  }
  if (draws) ResetAfterLast(p, shared.choice, shared.phase, ticket & ~kPhaseBit);
  if (active == 0) {
    if (p.direct && !p.accumulate) {
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
  Worker<kAll> worker(p, shared, pairs, warp, lane);
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
    p.slices_each = p.rows <= kAllSlicesRows ? 1 : kSlicesEach;
    p.team_warps = kMoeWarps / p.slices_each;
    p.direct = p.rows <= kDirectRows && pairs <= kDirectPairs;
    p.product = static_cast<float*>(launch.workspace);
    p.activation = reinterpret_cast<bf16*>(p.product + pairs * w.hidden);
    const bool all = w.hidden % (kSlices * kGateStep * 32) == 0 && w.inner % (kStep * 32) == 0;
    p.gate_tiles = static_cast<int>(w.inner / 16);
    p.down_tiles = static_cast<int>(w.hidden / kTileRows);
    p.hidden_groups = static_cast<int>(w.hidden / 32);
    p.inner_groups = static_cast<int>(w.inner / 32);
    p.slice_groups = (p.hidden_groups + kSlices - 1) / kSlices;
    p.slice_steps = all ? p.slice_groups / kGateStep : (p.slice_groups + kStep - 1) / kStep;
    // A ticket needs about a step to come, and then one of down another.
    const int steps = p.slices_each * p.slice_steps;
    p.take_at = std::min(steps, p.direct ? 1 : 2);
    p.draw_at = std::min(steps, p.take_at + 2);
    const cudaError_t error =
        LaunchAfter(launch, all ? MoeKernel<true> : MoeKernel<false>, dim3(launch.processors), kMoeThreads,
                    MoeSharedBytes(static_cast<int>(pairs)), p);
    if (error != cudaSuccess) return error;
    if (p.direct) continue;
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
