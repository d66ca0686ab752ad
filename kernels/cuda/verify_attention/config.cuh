// Shapes of the partial kernel and its shared memory, checked against what an sm_120 block may have.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/verify_attention/params.h"

namespace kdt::cuda {

inline constexpr int kMaxSharedBytes = 101376;  // of a block on sm_120
inline constexpr float kNoReference = -1e30f;   // below every finite score
inline constexpr float kRescaleAbove = 8.0f;    // log2

// A block works on kMTiles * 16 query rows: two score warps (QK) and four value warps (softmax, P x V,
// loading). The probabilities go into P x V as the sum of two bf16 numbers, which makes them as good as
// float32 for twice the products. For more rows: tall_config.cuh.
template <int kMTiles_, int kStages_, int kMinBlocks_>
struct VerifyConfig {
  static constexpr bool kTall = false;
  static constexpr int kMTiles = kMTiles_;
  static constexpr int kStages = kStages_;         // latent tiles in the ring
  static constexpr int kRopeStages = kStages - 1;  // rope parts are needed by QK only and die earlier
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr int kGroups = 1;
  static constexpr int kGroupRows = 16 * kMTiles, kTileRows = kGroupRows;
  static constexpr int kTileShift = kTileRows == 16 ? 4 : 5;
  static_assert(kTileRows == 1 << kTileShift);
  static constexpr int kScoreWarps = 2;
  static constexpr int kValueWarps = 4;
  static constexpr int kThreads = 32 * (kScoreWarps + kValueWarps);
  static constexpr int kOwners = 2 * kMTiles;  // value warps of a group that own 8 rows each in the softmax

  static constexpr int kLatentStage = kTileKeys * kLatent * 2;
  static constexpr int kRopeStage = kTileKeys * kRope * 2;
  static constexpr int kScoreHalf = kGroupRows * kTileKeys * 4;  // partial scores over half of the columns
  static constexpr int kScores = 2 * kScoreHalf;
  static constexpr int kProbPart = kGroupRows * kTileKeys * 2;
  static constexpr int kProbs = 2 * kProbPart;
  static constexpr int kFactors = kGroupRows * 4;

  static constexpr int kLatentAt = 0;
  static constexpr int kRopeAt = kLatentAt + kStages * kLatentStage;
  static constexpr int kQueryRopeAt = kRopeAt + kRopeStages * kRopeStage;
  static constexpr int kQueryRopeStep = 0;  // one group
  static constexpr int kScoresAt = kQueryRopeAt + kTileRows * kRope * 2;
  static constexpr int kProbsAt = kScoresAt + 2 * kScores;
  static constexpr int kFactorsAt = kProbsAt + 2 * kProbs;
  static constexpr int kFullAt = kFactorsAt + 2 * kFactors;
  static constexpr int kRopeEmptyAt = kFullAt + kStages * 8;
  static constexpr int kScoresFullAt = kRopeEmptyAt + kRopeStages * 8;
  static constexpr int kItemAt = kScoresFullAt + 2 * 8;
  static constexpr int kSharedBytes = kItemAt + 48;
  static_assert(kSharedBytes <= kMaxSharedBytes);
  // Named barriers: one for P, one of the score warps, two for scores that have been read. Named barriers,
  // because compute-sanitizer's racecheck takes an arrival at an mbarrier for what its own thread did before,
  // not for what the other lanes did before a __syncwarp, and arrivals of every lane cost time or registers
  // here.
  static constexpr int kProbsBarrier = 1, kQueryBarrier = 2, kScoresBarrier = 3;
  // Each score warp brings its queries in through private pieces of the ring's last stage, which is loaded
  // last, as many of their four parts at a time as fit.
  static constexpr int kStagingAt = kLatentAt + (kStages - 1) * kLatentStage;
  static constexpr int kStagingPiece = kGroupRows * 128;
  static constexpr int kStagingParts = kLatentStage / (kScoreWarps * kStagingPiece);
  static_assert(kStagingParts == 1 || kStagingParts == 2 || kStagingParts == 4);
};

}  // namespace kdt::cuda
