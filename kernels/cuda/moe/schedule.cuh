// The order of work and the stream of weights.
//
// Work is cut into items that blocks take in order by an atomic ticket: first all gate_up tiles, expert by
// expert, then the items of down. An item of down waits for the experts it needs; it cannot wait for ever,
// because who holds a gate_up item is running and waits for nobody. So nothing depends on how many blocks run
// at the same time.
//
// Each warp streams its own units through its own ring in shared memory (cp.async, in order, no hand-over
// between warps), and runs ahead of its own products across the borders of tiles, experts and items: the
// weights of down depend only on the router's choice, so they are on their way while activations are still
// being made.
#pragma once

#include "kdt/kernels/moe.h"
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/moe/choice.cuh"
#include "kernels/cuda/moe/int4.cuh"

namespace kdt::cuda {

inline constexpr int kMoeWarps = kMoeThreads / 32;
inline constexpr int kColumnsAtOnce = 8;  // rows of an expert that share one reading of its weights
inline constexpr int kStreamSlots = 2;    // units of a warp in shared memory: one under way, one at work
inline constexpr int kTicketRing = 16;
inline constexpr int kDownTiles = 4;  // tiles of 32 hidden rows an item

// How down is cut.
enum class DownMode : int {
  kDirect,  // few rows: a tile of hidden rows for all experts, a warp an expert, summed over experts in the
            // block
  kWarp,    // a warp an expert, kMoeWarps experts and kDownTiles tiles an item; products go to memory
  kSplit,   // wide experts: all warps share the inputs of one expert
};

struct MoeParams {
  const bf16* x;
  int64_t x_stride;
  kernels::Int4Experts w;
  const int32_t* ids;
  const float* weights;
  int rows, top_k;
  DownMode mode;
  bf16* activation;  // [pairs, inner]
  float* product;    // [pairs, hidden], not with kDirect
  void* out;
  int64_t out_stride;
  bool out_is_float, accumulate;
  // kMoeState words: the next ticket with a phase bit, and for each phase a counter of finished parts of
  // gate_up by active expert. Launches take turns with the phases: each clears the other's counters, so that
  // none has to clean up at its end.
  unsigned* state;
};
inline constexpr unsigned kPhaseBit = 1u << 31;
__device__ __forceinline__ unsigned* DoneCounters(const MoeParams& p, unsigned phase) {
  return p.state + 2 + (phase == 0 ? 0 : kMaxExperts);
}

enum class ItemKind : int { kGateUp, kDown, kEnd };

// What one warp does of an item: cells (expert, tile) in a row.
struct Item {
  ItemKind kind;
  int cells;
  int active, active_step;  // index among the active experts
  int tile, tile_step;
};

struct Shape {
  int gate_tiles, down_tiles;  // of 32 weight rows
  int hidden_groups, inner_groups;
  int gate_items, items;  // items in all

  __device__ Shape(const MoeParams& p, int active) {
    gate_tiles = static_cast<int>(p.w.inner / 16);
    down_tiles = static_cast<int>(p.w.hidden / kUnitRows);
    hidden_groups = static_cast<int>(p.w.hidden / 32);
    inner_groups = static_cast<int>(p.w.inner / 32);
    gate_items = active * gate_tiles;
    const int per_expert = (down_tiles + kDownTiles - 1) / kDownTiles;
    const int down = p.mode == DownMode::kDirect ? (active > 0 ? down_tiles : 0)
                     : p.mode == DownMode::kWarp ? (active + kMoeWarps - 1) / kMoeWarps * per_expert
                                                 : active * per_expert;
    items = gate_items + down;
  }
};

// Every block draws exactly one ticket past the end. After the last of these no one draws any more in this
// launch.
__device__ __forceinline__ void ResetAfterLast(const MoeParams& p, const Shape& s, const Choice& choice,
                                               int ticket) {
  if (ticket == s.items + static_cast<int>(gridDim.x) - 1) *p.state = choice.phase ^ kPhaseBit;
}

__device__ __forceinline__ Item MakeItem(const Shape& s, DownMode mode, int active, int warp, int ticket) {
  Item item{ItemKind::kDown, 1, 0, 0, 0, 0};
  if (ticket >= s.items) {
    item.kind = ItemKind::kEnd;
    item.cells = 0;
  } else if (ticket < s.gate_items) {
    item.kind = ItemKind::kGateUp;
    item.active = ticket / s.gate_tiles;
    item.tile = ticket % s.gate_tiles;
  } else if (mode == DownMode::kDirect) {
    item.active = warp, item.active_step = kMoeWarps;
    item.tile = ticket - s.gate_items;
    item.cells = (active - warp + kMoeWarps - 1) / kMoeWarps;
    if (item.cells < 0) item.cells = 0;
  } else {
    const int per_expert = (s.down_tiles + kDownTiles - 1) / kDownTiles;
    const int n = ticket - s.gate_items;
    item.tile = n % per_expert * kDownTiles, item.tile_step = 1;
    item.cells = min(kDownTiles, s.down_tiles - item.tile);
    item.active = n / per_expert;
    if (mode == DownMode::kWarp) {
      item.active = item.active * kMoeWarps + warp;
      if (item.active >= active) item.cells = 0;
    }
  }
  return item;
}

// Of a cell's units a warp takes all, or every kMoeWarps-th from its own.
struct Units {
  int first, step, count;
};
__device__ __forceinline__ Units UnitsOf(const Shape& s, ItemKind kind, DownMode mode, int warp) {
  const int units =
      ((kind == ItemKind::kGateUp ? s.hidden_groups : s.inner_groups) + kUnitGroups - 1) / kUnitGroups;
  if (kind == ItemKind::kGateUp || mode == DownMode::kSplit) {
    return {warp, kMoeWarps, warp < units ? (units - warp + kMoeWarps - 1) / kMoeWarps : 0};
  }
  return {0, 1, units};
}

// A warp's stream of units. kWhole: both widths are multiples of a unit's inputs.
template <bool kWhole>
class Stream {
 public:
  __device__ __forceinline__ Stream(const MoeParams& p, const Shape& s, const Choice& choice,
                                    volatile int* tickets, uint32_t ring, int warp, int lane)
      : p_(p), s_(s), choice_(choice), tickets_(tickets), ring_(ring), warp_(warp), lane_(lane) {}

  // Sends for units, a group of copies each, as long as there are free slots and the next item is known.
  __device__ __forceinline__ void Fill() {
    while (ahead_ < kStreamSlots - 1) {
      if (units_ == 0 && !NextItem()) return;
      const uint32_t to = ring_ + slot_ * kUnitBytes + lane_ * 16;
      const int groups = kWhole ? kUnitGroups : groups_ - unit_at_ * kUnitGroups;
      if (kWhole || groups >= kUnitGroups) {
#pragma unroll
        for (int i = 0; i < kUnitGroups; ++i) CopyAsync16(to + i * kGroupBytes, weights_ + i * kGroupBytes);
      } else {
        for (int i = 0; i < groups; ++i) CopyAsync16(to + i * kGroupBytes, weights_ + i * kGroupBytes);
      }
      if (lane_ < min(groups, kUnitGroups) * (kGroupScaleBytes / 16)) {
        CopyAsync16(to + kUnitWeightBytes, scales_);
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
      slot_ ^= 1;
      ++ahead_;
      Advance();
    }
  }
  // Waits for the oldest unit under way. All lanes have then finished with the unit before it, whose slot is
  // filled anew.
  __device__ __forceinline__ void Take() {
    while (ahead_ == 0) Fill();                           // the item was not known when its turn came
    asm volatile("cp.async.wait_group 0;" ::: "memory");  // with two slots there is one under way
    __syncwarp();
    --ahead_;
    Fill();
  }

 private:
  __device__ __forceinline__ void Advance() {
    // One more ticket, when the stream of this item is about to end: early enough to hide the atomic's way,
    // late enough not to take work from others.
    if (left_ == draw_at_) Draw();
    if (!kWhole) unit_at_ += step_;
    weights_ += static_cast<int64_t>(step_) * kUnitWeightBytes;
    scales_ += static_cast<int64_t>(step_) * kUnitScaleBytes;
    if (--left_ > 0) return;
    if (--passes_left_ > 0) {
      StartPass();
    } else if (--cells_left_ > 0) {
      item_.active += item_.active_step;
      item_.tile += item_.tile_step;
      StartCell();
    } else {
      FinishItem();
      units_ = 0;
    }
  }
  __device__ __forceinline__ void Draw() {
    drawn_ = true;
    draw_at_ = 0;
    // Not atomicAdd: the compiler would spread its result over the warp and so wait for it here.
    if (lane_ == 0)
      asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(ticket_) : "l"(p_.state) : "memory");
  }
  __device__ __forceinline__ void FinishItem() {
    if (warp_ != 0) return;
    if (!drawn_) Draw();
    if (lane_ == 0) {
      const int ticket = static_cast<int>(ticket_ & ~kPhaseBit);
      ResetAfterLast(p_, s_, choice_, ticket);
      tickets_[seq_ % kTicketRing] = ticket | static_cast<int>((seq_ & 0x7ff) << 20);
    }
    __syncwarp();
  }
  // Goes to the next item with units for this warp, if it is known by now. A warp must not wait for it here:
  // where it has no units in many items it would look far ahead, while the others wait for it at the end of
  // the present item.
  __device__ __forceinline__ bool NextItem() {
    for (;;) {
      const int value = __shfl_sync(~0u, tickets_[seq_ % kTicketRing], 0);
      if (ended_ || value >> 20 != static_cast<int>(seq_ & 0x7ff)) return false;
      item_ = MakeItem(s_, p_.mode, choice_.active, warp_, value & 0xfffff);
      ++seq_;
      drawn_ = false;
      ended_ = item_.kind == ItemKind::kEnd;
      if (ended_) return false;
      const Units units = UnitsOf(s_, item_.kind, p_.mode, warp_);
      if (units.count > 0 && item_.cells > 0) {
        units_ = units.count, first_ = units.first, step_ = units.step;
        cells_left_ = item_.cells;
        StartCell();
        return true;
      }
      FinishItem();
    }
  }
  __device__ __forceinline__ void StartCell() {
    const int rows = choice_.begin[item_.active + 1] - choice_.begin[item_.active];
    passes_left_ = (rows + kColumnsAtOnce - 1) / kColumnsAtOnce;
    StartPass();
  }
  __device__ __forceinline__ void StartPass() {
    const bool gate = item_.kind == ItemKind::kGateUp;
    groups_ = gate ? s_.hidden_groups : s_.inner_groups;
    const int64_t group =
        (static_cast<int64_t>(choice_.expert[item_.active]) * (gate ? s_.gate_tiles : s_.down_tiles) +
         item_.tile) *
            groups_ +
        first_ * kUnitGroups;
    weights_ =
        reinterpret_cast<const char*>(gate ? p_.w.gate_up : p_.w.down) + group * kGroupBytes + lane_ * 16;
    scales_ = reinterpret_cast<const char*>(gate ? p_.w.gate_up_scale : p_.w.down_scale) +
              group * kGroupScaleBytes + lane_ * 16;
    unit_at_ = first_;
    left_ = units_;
    draw_at_ = warp_ == 0 && passes_left_ == 1 && cells_left_ == 1 ? min(units_, 3) : 0;
  }

  const MoeParams& p_;
  const Shape& s_;
  const Choice& choice_;
  volatile int* const tickets_;
  const uint32_t ring_;
  const int warp_, lane_;
  unsigned seq_ = 0;
  int slot_ = 0, ahead_ = 0;  // the next slot, the next item, units under way
  Item item_;
  int units_ = 0, first_, step_, groups_;  // of a cell; units_ == 0: between items
  int unit_at_, left_, passes_left_, cells_left_, draw_at_ = 0;
  const char* weights_;
  const char* scales_;
  bool drawn_ = false, ended_ = false;
  unsigned ticket_ = 0;
};

}  // namespace kdt::cuda
