// The order of work.
//
// First come all tiles of gate_up, expert by expert: a team of warps draws one at a time by an atomic ticket
// and shares its inputs. Then comes down, where each warp is on its own. A tile of down waits for its
// expert; it cannot wait for ever, because a team goes on to down when all tiles of gate_up are drawn, and
// who has drawn one is running and waits for nobody. So nothing depends on how many blocks run at the same
// time.
//
// How a sum is cut depends on the widths alone, not on the rows: gate_up's inputs into kSlices slices, added
// up by rising slice in groups of kSlicesEach, and of down's tiles each warp takes all inputs.
#pragma once

#include "kdt/kernels/moe.h"
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/moe/choice.cuh"
#include "kernels/cuda/moe/choose.cuh"
#include "kernels/cuda/moe/int4.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {

inline constexpr int kMoeWarps = kMoeThreads / 32;
inline constexpr int kColumnsAtOnce = 8;  // rows of an expert that share one reading of its weights
inline constexpr int kSlices = kMoeWarps;
inline constexpr int kSlicesEach = 4;  // slices a warp takes where there are many tiles
inline constexpr int kMaxTeams = kSlicesEach;
inline constexpr int kTickets = 4;     // of a team, in its ring
inline constexpr int kDirectTeam = 8;  // warps that sum a tile of down, and with kFewest make its products
inline constexpr int kDirectTeams = kMoeWarps / kDirectTeam;
inline constexpr int kStep = 8;            // groups a warp has in registers or under way
inline constexpr int kGateStep = 7;        // the same in gate_up where widths fit
inline constexpr int kSharedPairs = 2816;  // of a launch whose list of pairs lies in shared memory
inline constexpr int kMaxPairs = 4096;     // of any
inline constexpr int kMaxBlocks = 256;

// Forms of the kernel. Where `widths fit` every step of a warp has all its groups.
enum class Form {
  kOne,     // as kFewest, for one row: all experts have a single row (row.cuh)
  kFewest,  // as kFour, but a team is the whole block, and tiles of down are on their own
  kFour,   // two tiles of down for all experts, summed in the block; activations go by mail (mail.cuh), and a
           // team is half the block
  kFew,    // as kFour, but a team has four warps, and each expert a counter in place of the mail
  kWhole,  // as kFew, but a team is the whole block
  kMany,   // products go to memory, and a second kernel sums
  kMost,   // as kMany, with lists of pairs in the workspace
  kRagged,  // as kMany, for any widths
};
inline constexpr int kFewestRows = 3, kFourRows = 4, kMailPairs = 32;  // the most for kFewest and kFour
inline constexpr int kFewRows = 8, kDirectPairs = 64;                  // the most for kFew
static_assert(kFewRows <= kDirectTeam);
__host__ __device__ constexpr bool IsDirect(Form form) { return form <= Form::kWhole; }
__host__ __device__ constexpr bool HasMail(Form form) { return form <= Form::kFour; }
__host__ __device__ constexpr int MailRows(Form form) {
  return form == Form::kOne ? 1 : form == Form::kFewest ? kFewestRows : kFourRows;
}
// How many warps choose for a row, where the choice is made here.
__host__ __device__ constexpr int RowWarps(Form form) { return form <= Form::kFour ? 4 : 2; }
static_assert(kFewRows == kBlockChoiceRows && kFewRows * RowWarps(Form::kFew) <= kMoeWarps &&
              kFourRows * RowWarps(Form::kFour) <= kMoeWarps && kFewestRows <= kFourRows &&
              RowWarps(Form::kFewest) == RowWarps(Form::kFour));
// A warp's slices of a tile of gate_up.
__host__ __device__ constexpr int SlicesEach(Form form) {
  return form == Form::kOne || form == Form::kFewest || form == Form::kWhole ? 1
         : form == Form::kFour                                               ? 2
                                                                             : kSlicesEach;
}

struct MoeParams {
  const bf16* x;
  int64_t x_stride;
  kernels::Int4Experts w;
  const int32_t* ids;
  const float* weights;
  int rows, top_k;
  int gate_tiles, down_tiles;  // of 32 weight rows
  unsigned gate_inverse;  // 2^32 / gate_tiles, rounded up: a ticket is divided by it at each tile's start
  int hidden_groups, inner_groups;
  int slice_groups, slice_steps;
  // So many steps before a team ends a tile of gate_up, its last warp draws the next one, and all take it: as
  // late as may be, because who is ahead of others shall take from them.
  int draw_at, take_at;
  uint16_t* pairs;   // [blocks, pairs], with kMost: blocks differ in the order of an expert's pairs
  bf16* activation;  // [pairs, inner], where there is no mail
  float* product;    // [pairs, hidden], with kMany, kMost and kRagged
  void* out;
  int64_t out_stride;
  bool out_is_float, accumulate;
  ChoiceParams choice;  // made here, where scores are given: then ids and weights are what it writes
  // The shared experts' down product, of so many pieces of 64 inputs, is made here and added to.
  const bf16 *shared_x, *shared_w;
  int64_t shared_x_stride, shared_w_stride;
  int shared_pieces;
  bool few_ids;  // MakeFewChoice does for them
  // kMoeState words: the next ticket of gate_up with a phase bit; for each phase a counter of finished tiles
  // of gate_up by active expert, the next ticket of down and the number of the launch; the mail. Launches
  // take turns with the phases: each clears the other's words, so that none has to clean up at its end.
  unsigned* state;
};
inline constexpr unsigned kPhaseBit = 1u << 31;
inline constexpr int kDownTicket = kMaxExperts, kLaunchNumber = kMaxExperts + 1;
static_assert(kMoePhaseWords == kMaxExperts + 2);
__device__ __forceinline__ unsigned* PhaseWords(const MoeParams& p, unsigned phase) {
  return p.state + 4 + (phase == 0 ? 0 : kMoePhaseWords);
}

__device__ __forceinline__ unsigned GateItems(const MoeParams& p, const Choice& choice) {
  return static_cast<unsigned>(choice.active * p.gate_tiles);
}

// The tile of a ticket of gate_up.
struct GateCell {
  int active, tile;
  __device__ __forceinline__ GateCell(const MoeParams& p, unsigned ticket)
      : active(static_cast<int>(static_cast<uint64_t>(ticket) * p.gate_inverse >> 32)),
        tile(static_cast<int>(ticket) - active * p.gate_tiles) {}
};

// Tiles of down a warp draws at once, and how many such runs an expert has. Long runs cost less, short ones
// leave less to wait for at the end.
struct Runs {
  int tiles, each;

  __device__ __forceinline__ void Plan(const MoeParams& p, const Choice& choice) {
    int run = 1;
    while (run < 8 && choice.active * p.down_tiles >= static_cast<int>(gridDim.x) * (kMoeWarps * 5) * run)
      run *= 2;
    tiles = run;
    each = (p.down_tiles + run - 1) / run;
  }
};

// Every one of a block's `teams` draws exactly one ticket past the end. After the last of these no one draws
// any more in this launch.
__device__ __forceinline__ void ResetAfterLast(const MoeParams& p, const Choice& choice, int teams,
                                               unsigned phase, unsigned ticket) {
  if (ticket == GateItems(p, choice) + gridDim.x * static_cast<unsigned>(teams) - 1)
    *p.state = phase ^ kPhaseBit;
}

// Not an addition: the compiler would count the warp's lanes, spread the result, and so wait for it at once.
__device__ __forceinline__ void DrawTicket(unsigned& ticket, unsigned* from) {
  asm volatile("atom.global.inc.u32 %0, [%1], 0xfffffffe;" : "=r"(ticket) : "l"(from) : "memory");
}
// The same, of several in a row the first.
template <int kCount>
__device__ __forceinline__ void DrawTickets(unsigned& ticket, unsigned* from) {
  if (kCount == 1) {
    DrawTicket(ticket, from);
  } else {
    asm volatile("atom.global.add.u32 %0, [%1], %2;" : "=r"(ticket) : "l"(from), "n"(kCount) : "memory");
  }
}

// Tiles of down in a row of one expert; none: tiles == 0.
struct Cell {
  int active = 0, tile = 0, tiles = 0;
};

}  // namespace kdt::cuda
