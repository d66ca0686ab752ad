// A warp of a block: the stream of its weights and the steps of its products. Its two phases: gate_up.cuh,
// down.cuh.
#pragma once

#include "kernels/cuda/moe/mail.cuh"
#include "kernels/cuda/moe/row.cuh"
#include "kernels/cuda/moe/schedule.cuh"
#include "kernels/cuda/moe/shared_down.cuh"

namespace kdt::cuda {

inline constexpr int kSumFloats = 256;  // of a warp for a tile
static_assert(kMailRow * 2 == kSumFloats * 4 / 2 && kMailPairs / 4 * kDirectTeams <= kMoeWarps);
inline constexpr int kRow = -1;  // a place of values that lie in shared memory

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
  static constexpr bool kAll = kForm != Form::kRagged, kMail = HasMail(kForm), kDirect = IsDirect(kForm);
  // A warp takes the block's two tiles of down at once, which share their inputs.
  static constexpr bool kPairs = kDirect && kForm != Form::kFewest && kForm != Form::kOne;
  // Whether gate_up, and down, have products of their own for an expert's single row (row.cuh), where
  // registers are left.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  static constexpr bool kFewestGateRows = false;
#else
  static constexpr bool kFewestGateRows = kForm == Form::kFewest;
#endif
  static constexpr bool kSingle = kForm == Form::kOne, kDownRows = kSingle || kForm == Form::kFewest,
                        kGateRows = kSingle || kFewestGateRows || kForm == Form::kFour;
  // Warps that share the experts of a tile.
  static constexpr int kTileTeam = kPairs ? kMoeWarps : kDirectTeam;
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

  // The tile of the shared experts' down product of a kDirectTeam, and with kFewest its first one of down.
  __device__ __forceinline__ static int FirstTile(int warp) {
    return static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) * (warp / kDirectTeam);
  }

  // The first weights are sent for.
  __device__ __forceinline__ void Start() {
    if (lane_ == 0) {
      if (!kDirect) state().runs.Plan(p_, choice());
      state().item = kPairs ? static_cast<int>(blockIdx.x) : FirstTile(warp_);
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
    const int tile = kPairs ? static_cast<int>(blockIdx.x) : FirstTile(warp_);
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
  // Of the row that is alone.
  __device__ __forceinline__ unsigned* MailCopy(int copy) const {
    return Mail() + copy * p_.top_k * static_cast<int>(p_.w.inner);
  }
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
  // A step: products of what has come, and sending for the next. Inputs are at x, or with kFromMail at
  // `mail`.
  template <int kGroups, bool kFromMail>
  __device__ __forceinline__ void Step(float (&acc)[2][4], const bf16* x, int mail, int groups, bool more,
                                       const Position& next, int next_groups, int next_second) {
    Weights weights;
    Inputs inputs;
    if (kAll) LoadInputs<4, 0, kFromMail>(inputs, x, mail, groups);
    Take<4>(weights, 0);
    if (!kAll) LoadInputs<4, 0, kFromMail>(inputs, x, mail, groups);  // there are no registers for it before
    SendFirst(more, next, next_groups);
    Multiply<4>(acc, weights, Operands<4>(inputs, surplus_));
    if (kAll) LoadInputs<kGroups - 4, 4, kFromMail>(inputs, x, mail, groups - 4);
    Take<kGroups - 4>(weights, 1);
    if (!kAll) LoadInputs<kGroups - 4, 4, kFromMail>(inputs, x, mail, groups - 4);
    parity_ ^= 1;
    SendSecond(more, next, next_groups, next_second);
    Multiply<kGroups - 4>(acc, weights, Operands<kGroups - 4>(inputs, surplus_));
  }
  // The same for an expert's single row; get_inputs() returns those of group g.
  template <int kGroups, typename GetInputs>
  __device__ __forceinline__ void RowStep(float (&acc)[2][4], const GetInputs& get_inputs, bool more,
                                          const Position& next, int next_groups, int next_second) {
    const uint4 x = get_inputs();
    RowSums sums;
    uint4 words[kSlotGroups];
    TakeRow<kSlotGroups>(sums, words, 0);
    SendFirst(more, next, next_groups);
    const RowInput input(x, surplus_);
    sums.Multiply<kSlotGroups, 0>(words, input, lane_);
    TakeRow<kGroups - kSlotGroups>(sums, words, 1);
    parity_ ^= 1;
    SendSecond(more, next, next_groups, next_second);
    sums.Multiply<kGroups - kSlotGroups, kSlotGroups>(words, input, lane_);
    sums.AddTo<kGroups>(acc);
  }
  template <int kGroups>
  __device__ __forceinline__ void TakeRow(RowSums& sums, uint4 (&words)[kSlotGroups], int slot) {
    BarrierWait(SharedAddress(&shared_.landed[warp_][slot]), parity_);
    sums.Take<kGroups>(words, ring_ + slot * kSlotBytes, slot * kSlotGroups, lane_);
    __syncwarp();
  }
  // The same four groups of two tiles.
  __device__ __forceinline__ void PairStep(float (&acc)[2][2][4], const bf16* x, int mail, bool more,
                                           const Position& next, int next_second) {
    Weights weights;
    Inputs inputs;
    LoadInputs<kSlotGroups, 0, kMail>(inputs, x, mail, kSlotGroups);
    Take<kSlotGroups>(weights, 0);
    SendFirst(more, next, kStep);
    const Operands<kSlotGroups> operands(inputs, surplus_);
    Multiply<kSlotGroups>(acc[0], weights, operands);
    Take<kSlotGroups>(weights, 1);
    parity_ ^= 1;
    SendSecond(more, next, kStep, next_second);
    Multiply<kSlotGroups>(acc[1], weights, operands);
  }
  // `groups` of a step, the first of them its kFirst-th.
  template <int kGroups, int kFirst, bool kFromMail>
  __device__ __forceinline__ void LoadInputs(Inputs& inputs, const bf16* x, int mail, int groups) const {
    if (!kFromMail) {
      inputs.Load<kGroups, kAll>(x + kFirst * 32, groups);
    } else if (mail == kRow) {
      const uint32_t from = row_ + kFirst * 64 + t_ * 16;
#pragma unroll
      for (int j = 0; j < kGroups; ++j) inputs.of[j] = LoadShared4U(from + j * 64);
    } else {
      ReadMail<kGroups, kAll>(inputs, Mail(), mail + kFirst * 16, groups, shared_.launch);
    }
  }

  // gate_up.cuh
  __device__ __forceinline__ unsigned GateTile(unsigned ticket, unsigned seq, int& round);
  __device__ __forceinline__ unsigned TakeTicket(unsigned seq);
  __device__ __forceinline__ void LeaveSums(const float (&acc)[2][4], int columns, int slice);
  __device__ __forceinline__ void FinishFew(int round, int tile, int begin, int columns);
  __device__ __forceinline__ static float Activation(float gate, float up);
  __device__ __forceinline__ void FinishGate(int round, int active, int tile, int begin, int columns);
  __device__ __forceinline__ static void LoadSums(float (&to)[4], uint32_t from);

  // down.cuh
  __device__ __forceinline__ void DrawDown();
  __device__ __forceinline__ bool NextCell(Position& at);
  __device__ __forceinline__ void Down();
  __device__ __forceinline__ void WaitForExpert(int active, int rows);
  __device__ __forceinline__ float* Products(int team) const;
  __device__ __forceinline__ int ProductAt(int pair) const;
  __device__ __forceinline__ void FetchRow(int pair);
  __device__ __forceinline__ void StoreOut(int64_t at, float value) const;
  __device__ __forceinline__ void SumExperts(int first_tile);

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
};

}  // namespace kdt::cuda
