// What the warps of a block do: the stream of weights, the products, and the hand-overs.
#pragma once

#include "kernels/cuda/moe/mail.cuh"
#include "kernels/cuda/moe/schedule.cuh"
#include "kernels/cuda/moe/shared_down.cuh"

namespace kdt::cuda {

inline constexpr int kSumFloats = 256;  // of a warp for a tile
static_assert(kFewestRows * 32 <= kSumFloats / 2 && kMailRow * 2 == kSumFloats * 4 / 2 &&
              kMailPairs / 4 * kDirectTeams <= kMoeWarps);
inline constexpr int kNoMail = -(1 << 30);  // a place of a value that stays negative when added to
inline constexpr int kRow = kNoMail - 1;    // values that lie in shared memory

// What a warp needs now and then, for which there are no registers.
struct WarpState {
  Runs runs;         // the same for all
  Cell next;         // of down: whose weights are under way
  int item, expert;  // where IsDirect: the tile of the team, the next expert of the warp
};

// Dynamic shared memory: this and the list of pairs, and where the choice is made here Few.
struct Shared {
  union {
    unsigned char rings[kMoeWarps][2 * kSlotBytes];
    BlockChoice chosen;  // before the first weights are sent for
  };
  union {
    float exchange[kMoeWarps][kSumFloats];  // sums of gate_up's tiles; before that, MakeChoice's counts
    SharedSums shared_sums[kDirectTeams];   // before that as well
    float products[kDirectTeams][kDirectPairs * kTileRows];  // later, where IsDirect
  };
  uint4 surplus;
  uint64_t landed[kMoeWarps][2];               // barriers of the rings' slots
  uint64_t full[kMaxTeams], empty[kMaxTeams];  // barriers of the exchange
  uint64_t drawn[kMaxTeams][kTickets];         // and of the tickets
  unsigned tickets[kMaxTeams][kTickets];
  unsigned phase, launch;
  WarpState warps[kMoeWarps];
  Choice choice;
};
static_assert(sizeof(Shared) % 16 == 0 && kMaxExperts * 4 <= sizeof(Shared::exchange));
struct Few {
  float shared_out[kDirectTeams][kFewRows][kTileRows];  // of the shared experts
};
constexpr int MoeSharedBytes(int pairs) {
  return static_cast<int>(sizeof(Shared)) + (pairs * 2 + 15) / 16 * 16;
}
constexpr int kFewBytes = MoeSharedBytes(kBlockChoiceRows * kBlockChoiceTopK);  // where Few lies
static_assert(MoeSharedBytes(kSharedPairs) <= 101376 && kFewBytes + sizeof(Few) <= 101376);

template <Form kForm>
class Worker {
  // kAll: every step has all its groups.
  static constexpr bool kAll = kForm != Form::kRagged, kMail = kForm == Form::kFewest,
                        kDirect = IsDirect(kForm);
  // A warp takes the block's two tiles of down at once, which share their inputs.
  static constexpr bool kPairs = kDirect && !kMail;
  static constexpr int kTileTeam = kMail ? kDirectTeam : kMoeWarps;  // warps that share the experts of a tile
  static constexpr int kEach = SlicesEach(kForm), kTeamWarps = kMoeWarps / kEach;

 public:
  __device__ __forceinline__ Worker(const MoeParams& p, Shared& shared, Few& few, const uint16_t* pairs,
                                    int warp, int lane)
      : p_(p),
        shared_(shared),
        few_(few),
        pairs_(pairs),
        warp_(warp),
        lane_(lane),
        g_(lane >> 2),
        t_(lane & 3),
        team_(warp / kTeamWarps),
        member_(warp % kTeamWarps),
        surplus_(&shared.surplus),
        ring_(SharedAddress(shared.rings[warp])) {}

  // The tile of the shared experts' down product of a kDirectTeam, and with kMail its first one of down.
  __device__ __forceinline__ static int FirstTile(int warp) {
    return static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) * (warp / kDirectTeam);
  }

  // The first weights are sent for.
  __device__ __forceinline__ void Start() {
    if (lane_ == 0) {
      if (!kDirect) state().runs.Plan(p_, choice());
      state().item = kMail ? FirstTile(warp_) : static_cast<int>(blockIdx.x);
      state().expert = warp_ % kTileTeam;
    }
    __syncwarp();
    const unsigned ticket = shared_.tickets[team_][kTickets - 1];
    first_group_ = member_ * kEach * p_.slice_groups;
    if (ticket < GateItems(p_, choice())) {
      at_ = GatePosition(ticket);
      SendFirst(true, at_, GateGroups(first_group_, p_.slice_groups));
      SendSecond(true, at_, GateGroups(first_group_, p_.slice_groups));
    } else {
      if (!kDirect) DrawDown();
      const bool more = NextCell(at_);
      SendFirst(more, at_, min(kStep, p_.inner_groups));
      SendSecond(more, at_, min(kStep, p_.inner_groups), Second());
    }
  }

  // What SharedDown::Multiply left becomes what the experts are added to, a warp a row, a lane a column.
  __device__ __forceinline__ void FinishShared() {
    const int team = warp_ / kDirectTeam, row = warp_ % kDirectTeam;
    const SharedSums& sums = shared_.shared_sums[team];
    float sum = sums[0][row][lane_];
#pragma unroll
    for (int piece = 1; piece < kSharedPieces; ++piece) sum += sums[piece][row][lane_];
    few_.shared_out[team][row][lane_] = p_.out_is_float ? sum : Rounded<bf16>(sum);
  }
  // `out` where no expert of any row is held here.
  __device__ __forceinline__ void SumNothing() {
    const int tile = kMail ? FirstTile(warp_) : static_cast<int>(blockIdx.x);
    if (tile < p_.down_tiles) SumExperts(tile);
  }

  __device__ __forceinline__ void Run() {
    unsigned ticket = shared_.tickets[team_][kTickets - 1];
    const unsigned end = GateItems(p_, choice());
    int round = 0;
    for (unsigned seq = 0; ticket < end; ++seq) ticket = GateTile(ticket, seq, round);
    Down();
  }

 private:
  __device__ __forceinline__ bool Draws() const { return member_ == kTeamWarps - 1 && lane_ == 0; }
  __device__ __forceinline__ unsigned* Done() const { return PhaseWords(p_, shared_.phase); }
  __device__ __forceinline__ unsigned* Mail() const { return p_.state + 4 + 2 * kMoePhaseWords; }
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
    const GateCell cell(p_, ticket);
    return PositionOf(true, cell.active, cell.tile, first_group_);
  }
  __device__ __forceinline__ Position DownPosition(const Cell& cell) const {
    return PositionOf(false, cell.active, cell.tile, 0);
  }
  // Groups of a step that starts at `group` of gate_up's inputs with `left` to go in its slice.
  __device__ __forceinline__ int GateGroups(int group, int left) const {
    if (kAll) return kGateStep;
    return max(0, min(min(left, kStep), p_.hidden_groups - group));
  }

  // From a tile of down to the one that is taken together with it, in groups.
  __device__ __forceinline__ int Apart() const { return static_cast<int>(gridDim.x) * p_.inner_groups; }
  // What the second slot holds at the start of the next cell: the first four groups of the other tile, or
  // four more of the only one.
  __device__ __forceinline__ int Second() const {
    return kPairs && state().next.tiles == 2 ? Apart() : kSlotGroups;
  }

  // What a step needs, in two parts: four groups, and what is left or `second` groups behind.
  __device__ __forceinline__ void SendFirst(bool more, const Position& from, int groups) {
    if (!more) return;
    SendGroups<4, kAll>(ring_, from, groups, lane_);
    CopyAsyncArrive(SharedAddress(&shared_.landed[warp_][0]));
  }
  __device__ __forceinline__ void SendSecond(bool more, const Position& from, int groups,
                                             int second = kSlotGroups) {
    if (!more) return;
    SendGroups<3, kAll>(ring_ + kSlotBytes, from.Groups(second), groups - 4, lane_);
    CopyAsyncArrive(SharedAddress(&shared_.landed[warp_][1]));
  }
  // The older of the two parts under way; what follows may be sent to its place.
  template <int kGroups>
  __device__ __forceinline__ void Take(Weights& weights, int slot) {
    BarrierWait(SharedAddress(&shared_.landed[warp_][slot]), parity_);
    weights.Take<kGroups>(ring_ + slot * kSlotBytes, lane_);
    __syncwarp();
  }
  // A step: products of what has come, and sending for the next. Inputs are at x, or with `mail` not negative
  // there.
  template <int kGroups>
  __device__ __forceinline__ void Step(float (&acc)[2][4], const bf16* x, int mail, int groups, bool more,
                                       const Position& next, int next_groups, int next_second) {
    Weights weights;
    Inputs inputs;
    if (kAll) LoadInputs<4, 0>(inputs, x, mail, groups);
    Take<4>(weights, 0);
    if (!kAll) LoadInputs<4, 0>(inputs, x, mail, groups);  // there are no registers for it before
    SendFirst(more, next, next_groups);
    Multiply<4>(acc, weights, Operands<4>(inputs, surplus_));
    if (kAll) LoadInputs<kGroups - 4, 4>(inputs, x + 4 * 32, mail == kRow ? kRow : mail + 4 * 16, groups - 4);
    Take<kGroups - 4>(weights, 1);
    if (!kAll)
      LoadInputs<kGroups - 4, 4>(inputs, x + 4 * 32, mail == kRow ? kRow : mail + 4 * 16, groups - 4);
    parity_ ^= 1;
    SendSecond(more, next, next_groups, next_second);
    Multiply<kGroups - 4>(acc, weights, Operands<kGroups - 4>(inputs, surplus_));
  }
  // The same four groups of two tiles.
  __device__ __forceinline__ void PairStep(float (&acc)[2][2][4], const bf16* x, bool more,
                                           const Position& next, int next_second) {
    Weights weights;
    Inputs inputs;
    inputs.Load<kSlotGroups, true>(x, kSlotGroups);
    Take<kSlotGroups>(weights, 0);
    SendFirst(more, next, kStep);
    const Operands<kSlotGroups> operands(inputs, surplus_);
    Multiply<kSlotGroups>(acc[0], weights, operands);
    Take<kSlotGroups>(weights, 1);
    parity_ ^= 1;
    SendSecond(more, next, kStep, next_second);
    Multiply<kSlotGroups>(acc[1], weights, operands);
  }
  // Groups of a step from kFirst on.
  template <int kGroups, int kFirst>
  __device__ __forceinline__ void LoadInputs(Inputs& inputs, const bf16* x, int mail, int groups) const {
    if (kMail && mail == kRow) {
      const uint32_t from = row_ + kFirst * 64 + t_ * 16;
#pragma unroll
      for (int j = 0; j < kGroups; ++j) inputs.of[j] = LoadShared4U(from + j * 64);
    } else if (kMail && mail >= 0) {
      ReadMail<kGroups, kAll>(inputs, Mail(), mail, groups, shared_.launch);
    } else {
      inputs.Load<kGroups, kAll>(x, groups);
    }
  }

  // One tile of gate_up; returns the next ticket.
  __device__ __forceinline__ unsigned GateTile(unsigned ticket, unsigned seq, int& round) {
    const unsigned end = GateItems(p_, choice());
    const auto [active, tile] = GateCell(p_, ticket);
    const int begin = choice().begin[active], count = choice().begin[active + 1] - begin;
    unsigned next_ticket = 0;
    for (int first = 0; first < count; first += kColumnsAtOnce, ++round) {
      const bool last_pass = first + kColumnsAtOnce >= count;
      // Columns past the last pair repeat it; what they give is not stored.
      const int columns = min(count - first, kColumnsAtOnce);
      const int mine = pairs_[begin + first + min(g_, columns - 1)];
      const bf16* x = p_.x + mine / p_.top_k * p_.x_stride + first_group_ * 32 + 8 * t_;
      float4* const mine_sums = reinterpret_cast<float4*>(shared_.exchange[warp_]) + lane_;
      int group = first_group_, left = kEach * p_.slice_steps;
#pragma unroll 1
      for (int slice = 0; slice < kEach; ++slice) {
        const bool last_slice = slice == kEach - 1;
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
          int next_second = kSlotGroups;
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
              next_second = Second();
            }
          }
          Step<kAll ? kGateStep : kStep>(acc, x, kNoMail, groups, more, next, next_groups, next_second);
          at_ = next;
          x += groups * 32;
        }
        if (slice == 0) {
          if (round > 0) BarrierWait(SharedAddress(&shared_.empty[team_]), (round - 1) & 1);
          if (kMail) {
            LeaveSums(acc, columns);
            continue;
          }
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
      BarrierArrive(SharedAddress(&shared_.full[team_]));
      if (round % kTeamWarps != member_) continue;
      if (kMail) {
        FinishFew(round, tile, begin + first, columns);
      } else {
        FinishGate(round, active, tile, begin + first, columns);
      }
    }
    return next_ticket;
  }

  // The team's next ticket, which its last warp has drawn.
  __device__ __forceinline__ unsigned TakeTicket(unsigned seq) {
    const uint32_t barrier = SharedAddress(&shared_.drawn[team_][seq % kTickets]);
    if (Draws()) {
      const unsigned drawn = drawn_ & ~kPhaseBit;
      ResetAfterLast(p_, choice(), kEach, shared_.phase, drawn);
      shared_.tickets[team_][seq % kTickets] = drawn;
      BarrierArrive(barrier);
    }
    __syncwarp();
    BarrierWait(barrier, seq / kTickets & 1);
    const unsigned next = shared_.tickets[team_][seq % kTickets];
    if (next >= GateItems(p_, choice()) && !kDirect) DrawDown();
    return next;
  }

  // With kMail a tile has a column or few, and sums lie in the exchange by column, 16 of gate, then 16 of up.
  __device__ __forceinline__ void LeaveSums(const float (&acc)[2][4], int columns) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int column = 2 * t_ + odd;
      if (column >= columns) continue;
      float* const to = shared_.exchange[warp_] + column * 32 + g_;
#pragma unroll
      for (int m = 0; m < 2; ++m) to[m * 16] = acc[m][odd], to[m * 16 + 8] = acc[m][2 + odd];
    }
  }
  // What FinishGate does, a lane a sum, to the mail.
  __device__ __forceinline__ void FinishFew(int round, int tile, int begin, int columns) {
    BarrierWait(SharedAddress(&shared_.full[team_]), round & 1);
    const int inner = static_cast<int>(p_.w.inner);
#pragma unroll 1
    for (int column = 0; column < columns; ++column) {
      float part[kSlices];
#pragma unroll
      for (int w = 0; w < kSlices; ++w) part[w] = shared_.exchange[w][column * 32 + lane_];
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kSlices; w += kSlicesEach) sum += part[w] + part[w + 1] + part[w + 2] + part[w + 3];
      sum *= kUnscale;
      const float value = Activation(sum, __shfl_down_sync(~0u, sum, 16)),
                  next = __shfl_down_sync(~0u, value, 1);
      if (lane_ < 16 && lane_ % 2 == 0) {
        PostPair(Mail(), (pairs_[begin + column] * inner + tile * 16 + lane_) / 2, PackBf16(value, next),
                 shared_.launch);
      }
    }
    BarrierArrive(SharedAddress(&shared_.empty[team_]));
  }
  __device__ __forceinline__ static float Activation(float gate, float up) {
    return gate / (1.0f + expf(-gate)) * up;
  }

  // One warp of the team adds up and writes the activations.
  __device__ __forceinline__ void FinishGate(int round, int active, int tile, int begin, int columns) {
    BarrierWait(SharedAddress(&shared_.full[team_]), round & 1);
    const uint32_t from = SharedAddress(shared_.exchange[team_ * kTeamWarps]) + lane_ * 16;
    float sum[2][4] = {}, part[2][4];
    for (int w = 0; w < kTeamWarps; ++w) {
#pragma unroll
      for (int m = 0; m < 2; ++m) LoadSums(part[m], from + (w * 2 + m) * 512);
#pragma unroll
      for (int i = kEach; i < kSlicesEach; ++i) {
        ++w;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          float more[4];
          LoadSums(more, from + (w * 2 + m) * 512);
#pragma unroll
          for (int e = 0; e < 4; ++e) part[m][e] += more[e];
        }
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[m][e] += part[m][e];
      }
    }
    BarrierArrive(SharedAddress(&shared_.empty[team_]));
    const int inner = static_cast<int>(p_.w.inner);
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int column = 2 * t_ + odd;
      float value[2];  // of rows g and g + 8
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = sum[0][2 * half + odd] * kUnscale, high = sum[1][2 * half + odd] * kUnscale;
        value[half] = Activation(low, high);
      }
      if (column < columns) {
        bf16* const to = p_.activation + pairs_[begin + column] * inner + tile * 16 + g_;
        to[0] = __float2bfloat16_rn(value[0]);
        to[8] = __float2bfloat16_rn(value[1]);
      }
    }
    __syncwarp();
    if (lane_ == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(Done() + active) : "memory");
  }
  __device__ __forceinline__ static void LoadSums(float (&to)[4], uint32_t from) {
    const float4 v = LoadShared4(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }

  __device__ __forceinline__ void DrawDown() {
    if (lane_ == 0) DrawTicket(drawn_, Done() + kDownTicket);
  }
  // What the warp does next in down, and where that begins; false at the end.
  __device__ __forceinline__ bool NextCell(Position& at) {
    Cell next;
    if (kDirect) {
      int item = state().item, expert = state().expert;
      __syncwarp();
      if (expert < choice().active && item < p_.down_tiles) {
        const bool pair = kPairs && item + static_cast<int>(gridDim.x) < p_.down_tiles;
        next = {expert, item, pair ? 2 : 1};
        expert += kTileTeam;
        if (expert >= choice().active) {
          item += static_cast<int>(gridDim.x) * kDirectTeams;
          expert = warp_ % kTileTeam;
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
    const int inner = static_cast<int>(p_.w.inner);
    const int steps = (p_.inner_groups + kStep - 1) / kStep;
    if (kDirect) __syncthreads();              // the exchange becomes the products
    if (kDirect && state().next.tiles == 0) {  // more warps than experts
      for (int item = state().item; item < p_.down_tiles; item += static_cast<int>(gridDim.x) * kDirectTeams)
        SumExperts(item);
    }
    while (state().next.tiles > 0) {
      const Cell cell = state().next;
      const int begin = choice().begin[cell.active], count = choice().begin[cell.active + 1] - begin;
      if (!kDirect) DrawDown();
      if (!kMail) WaitForExpert(cell.active, count);
      for (int first = 0; first < count; first += kColumnsAtOnce) {
        const bool last_pass = first + kColumnsAtOnce >= count;
        const int left = min(count - first, kColumnsAtOnce);
        const int mine = pairs_[begin + first + min(g_, left - 1)];
        const bf16* const inputs = p_.activation + mine * inner + 8 * t_;
        int to[2];  // where the lane's two columns go
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const int column = 2 * t_ + odd;
          to[odd] = column < left ? ProductAt(pairs_[begin + first + column]) : -1;
        }
        const auto store = [&](float* products, const float(&acc)[2][4]) {
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            if (to[odd] < 0) continue;
#pragma unroll
            for (int m = 0; m < 2; ++m) {
              products[to[odd] + 16 * m] = acc[m][odd] * kUnscale;
              products[to[odd] + 16 * m + 8] = acc[m][2 + odd] * kUnscale;
            }
          }
        };
        if (kPairs && cell.tiles == 2) {
          float acc[2][2][4] = {};
          const bf16* x = inputs;
#pragma unroll 1
          for (int part = steps * kStep / kSlotGroups; part > 0; --part) {
            Position next = at_.Groups(kSlotGroups);
            int next_second = Apart();
            bool more = true;
            if (part == 1) {
              more = NextCell(next);
              next_second = Second();
            }
            PairStep(acc, x, more, next, next_second);
            at_ = next;
            x += kSlotGroups * 32;
          }
          store(Products(0) + g_, acc[0]);
          store(Products(1) + g_, acc[1]);
          break;
        }
#pragma unroll 1
        for (int tile = 0; tile < cell.tiles; ++tile) {
          float acc[2][4] = {};
          const bf16* x = inputs;
          int mail = kMail ? (mine * inner + 8 * t_) / 2 : kNoMail;
          // A single row, of one step, with one way to L2.
          if (kMail && left == 1 && p_.inner_groups == kStep) {
            FetchRow(mine, cell.tile);
            mail = kRow;
          }
          int groups_left = p_.inner_groups;
#pragma unroll 1
          for (int step = steps; step > 0; --step) {
            const int groups = kAll ? kStep : min(kStep, groups_left);
            groups_left -= groups;
            Position next = at_.Groups(groups);
            const int next_groups = kAll ? kStep : min(kStep, step > 1 ? groups_left : p_.inner_groups);
            int next_second = kSlotGroups;
            bool more = true;
            if (step == 1 && tile == cell.tiles - 1) {
              if (!last_pass) {
                next = DownPosition(cell);
              } else {
                more = NextCell(next);
                next_second = Second();
              }
            }
            Step<kStep>(acc, x, mail, groups, more, next, next_groups, next_second);
            at_ = next;
            x += kStep * 32;
            if (mail != kRow) mail += kStep * 16;
          }
          store(kDirect ? Products(kMail ? warp_ / kDirectTeam : 0) + g_
                        : p_.product + (cell.tile + tile) * kTileRows + g_,
                acc);
        }
        if (kPairs) break;
      }
      if (kDirect && (state().next.tiles == 0 || state().next.tile != cell.tile)) SumExperts(cell.tile);
    }
  }

  __device__ __forceinline__ void WaitForExpert(int active, int rows) {
    if (active == ready_) return;
    const unsigned target =
        static_cast<unsigned>(p_.gate_tiles * ((rows + kColumnsAtOnce - 1) / kColumnsAtOnce));
    while (LoadAcquireDevice(Done() + active) < target) {
    }
    ready_ = active;
    __syncwarp();
  }

  // Products of either of two tiles of down, by pair. With kMail half of the exchange is for FetchRow, and
  // a row of it has the products of four pairs.
  __device__ __forceinline__ float* Products(int team) const {
    return kMail ? shared_.exchange[team * (kMailPairs / 4)] : shared_.products[team];
  }
  __device__ __forceinline__ int ProductAt(int pair) const {
    if (kMail) return pair / 4 * kSumFloats + pair % 4 * kTileRows;
    return pair * (kDirect ? kTileRows : static_cast<int>(p_.w.hidden));
  }
  // With kMail: the activations of a pair. With one row, where all wait for them at once, the two warps that
  // take the same expert, for the block's two tiles, fetch half of them each, to a place of either in turn.
  __device__ __forceinline__ void FetchRow(int pair, int tile) {
    const bool shared =
        p_.rows == 1 && (warp_ >= kDirectTeam || tile + static_cast<int>(gridDim.x) < p_.down_tiles);
    const int place = shared ? warp_ % kDirectTeam + (row_of_second_ ? kDirectTeam : 0) : warp_;
    float* const row = shared_.exchange[place] + kSumFloats / 2;
    row_ = SharedAddress(row);
    row_of_second_ = !row_of_second_;
    if (shared) {
      ReadMailRow<1>(row, Mail(), pair, shared_.launch, warp_ / kDirectTeam * 32 + lane_);
      NamedBarrier(1 + kDirectTeams + warp_ % kDirectTeam, 64);
    } else {
      ReadMailRow<2>(row, Mail(), pair, shared_.launch, lane_);
      __syncwarp();
    }
  }

  __device__ __forceinline__ void StoreOut(int64_t at, float value) const {
    if (p_.out_is_float) {
      static_cast<float*>(p_.out)[at] = value;
    } else {
      static_cast<bf16*>(p_.out)[at] = FromFloat<bf16>(value);
    }
  }

  // The warps of a kTileTeam make all products of a tile, or of this and the one it is paired with; then each
  // kDirectTeam sums a tile, a warp a row, a lane a column.
  __device__ __forceinline__ void SumExperts(int first_tile) {
    const int tile = first_tile + (kMail ? 0 : static_cast<int>(gridDim.x) * (warp_ / kDirectTeam));
    const int row = tile < p_.down_tiles ? warp_ % kDirectTeam : kDirectTeam,
              column = tile * kTileRows + lane_;
    const int barrier = kMail ? 1 + warp_ / kDirectTeam : 1;
    const float* const from = Products(warp_ / kDirectTeam) + lane_;
    float sum = 0.0f, before = 0.0f;
    const int64_t at = row * p_.out_stride + column;
    if (p_.shared_pieces > 0) {
      if (row < p_.rows) before = few_.shared_out[warp_ / kDirectTeam][row][lane_];
    } else if (p_.accumulate && row < p_.rows) {
      before = p_.out_is_float ? static_cast<float*>(p_.out)[at] : ToFloat(static_cast<bf16*>(p_.out)[at]);
    }
    NamedBarrier(barrier, kTileTeam * 32);
    if (row < p_.rows) {
      for (int k = 0; k < p_.top_k; ++k) {
        const int pair = row * p_.top_k + k;
        if (choice().held >> pair & 1) sum = fmaf(choice().weights[pair], from[ProductAt(pair)], sum);
      }
      if (p_.accumulate) sum = before + sum;
      StoreOut(at, sum);
    }
    NamedBarrier(barrier, kTileTeam * 32);  // the products have been read
  }

  const MoeParams& p_;
  Shared& shared_;
  Few& few_;
  const uint16_t* const pairs_;
  const int warp_, lane_, g_, t_, team_, member_;
  const Surplus surplus_;
  int first_group_;
  const uint32_t ring_;
  int parity_ = 0;      // of the barriers of the ring
  Position at_;         // of the step under way
  unsigned drawn_ = 0;  // the ticket under way: the team's in its last warp, then in each warp its own
  int ready_ = -1;
  uint32_t row_ = 0;  // FetchRow's
  bool row_of_second_ = false;
};

}  // namespace kdt::cuda
