// Shapes of the partial kernel and its shared memory, checked against what an sm_120 block may have.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/verify_attention/params.h"

namespace kdt::cuda {

inline constexpr int kMaxSharedBytes = 101376;  // of a block on sm_120
inline constexpr float kNoReference = -1e30f;   // below every finite score
inline constexpr float kRescaleAbove = 8.0f;    // log2

// How a value warp tells mbarriers that it has read what they guard: one lane, behind __syncwarp().
// compute-sanitizer does not follow an order that goes through another lane and reports a race; for its
// racecheck, build with KDT_EVERY_LANE_ARRIVES, which costs no time but registers that sm_120 does not have
// to spare. Score warps arrive with every lane, for the same reason.
#ifdef KDT_EVERY_LANE_ARRIVES
inline constexpr int kArrivals = 32;
#else
inline constexpr int kArrivals = 1;
#endif
template <typename... Barriers>
__device__ __forceinline__ void WarpArrive(int lane, Barriers... barriers) {
  __syncwarp();
  if (kArrivals == 32 || lane == 0) (BarrierArrive(barriers), ...);
}

// A group works on kMTiles * 16 query rows: two score warps (QK) and four value warps (softmax, PV, loading).
// A block has kGroups of them, which share the key tiles. With kProbParts 2 the probabilities go into P x V
// as the sum of two bf16 numbers, which makes them as good as float32 for twice the products; with 1 they are
// rounded to bf16.
template <int kMTiles_, int kGroups_, int kStages_, int kMinBlocks_, int kProbParts_>
struct VerifyConfig {
  static constexpr int kMTiles = kMTiles_;
  static constexpr int kGroups = kGroups_;
  static constexpr int kProbParts = kProbParts_;
  static constexpr bool kHalves =
      kProbParts == 1;                             // partial results in 16 bits: the probabilities have fewer
  static constexpr int kStages = kStages_;         // latent tiles in the ring
  static constexpr int kRopeStages = kStages - 1;  // rope parts are needed by QK only and die earlier
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr int kGroupRows = 16 * kMTiles;
  static constexpr int kTileRows = kGroupRows * kGroups;
  static constexpr int kTileShift = kTileRows == 16 ? 4 : kTileRows == 32 ? 5 : 6;
  static_assert(kTileRows == 1 << kTileShift);
  static constexpr int kScoreWarps = 2 * kGroups;
  static constexpr int kValueWarps = 4 * kGroups;
  static constexpr int kThreads = 32 * (kScoreWarps + kValueWarps);
  static constexpr int kOwners = 2 * kMTiles;  // value warps of a group that own 8 rows each in the softmax

  static constexpr int kLatentStage = kTileKeys * kLatent * 2;
  static constexpr int kRopeStage = kTileKeys * kRope * 2;
  static constexpr int kScoreHalf =
      kGroupRows * kTileKeys * 4;  // partial scores of a group over half of the columns
  static constexpr int kScores = 2 * kScoreHalf;
  static constexpr int kProbPart = kGroupRows * kTileKeys * 2;
  static constexpr int kProbs = kProbParts * kProbPart;
  static constexpr int kFactors = kGroupRows * 4;

  static constexpr int kLatentAt = 0;
  static constexpr int kRopeAt = kLatentAt + kStages * kLatentStage;
  static constexpr int kQueryRopeAt = kRopeAt + kRopeStages * kRopeStage;
  static constexpr int kScoresAt = kQueryRopeAt + kTileRows * kRope * 2;
  static constexpr int kProbsAt = kScoresAt + kGroups * 2 * kScores;
  static constexpr int kFactorsAt = kProbsAt + kGroups * 2 * kProbs;
  static constexpr int kFullAt = kFactorsAt + kGroups * 2 * kFactors;
  static constexpr int kEmptyAt = kFullAt + kStages * 8;
  static constexpr int kRopeEmptyAt = kEmptyAt + kStages * 8;
  static constexpr int kScoresFullAt = kRopeEmptyAt + kRopeStages * 8;
  static constexpr int kScoresEmptyAt = kScoresFullAt + kGroups * 2 * 8;
  static constexpr int kItemAt = kScoresEmptyAt + kGroups * 2 * 8;
  static constexpr int kSharedBytes = kItemAt + 48;
  static_assert(kSharedBytes <= kMaxSharedBytes);
  // Each score warp brings its queries in through a private piece of the ring's last stage, which is loaded
  // last.
  static constexpr int kStagingAt = kLatentAt + (kStages - 1) * kLatentStage;
  static constexpr int kStagingPiece = kGroupRows * 128;
  static_assert(kScoreWarps * kStagingPiece <= kLatentStage);
};

}  // namespace kdt::cuda
