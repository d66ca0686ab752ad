// Shapes of the partial kernel and its shared memory, checked against what an sm_120 block may have.
#pragma once

#include "kernels/cuda/verify_attention/params.h"

namespace kdt::cuda {

inline constexpr int kMaxSharedBytes = 101376;      // of a block on sm_120
inline constexpr float kNoReference = -1e30f;       // below every finite score
inline constexpr float kRescaleAbove = 8.0f;        // log2

// A group is four warps that work on kMTiles * 16 query rows; a block has kGroups of them which share the keys.
template <int kMTiles_, int kGroups_, int kStages_, int kMinBlocks_>
struct VerifyConfig {
  static constexpr int kMTiles = kMTiles_;
  static constexpr int kGroups = kGroups_;
  static constexpr int kStages = kStages_;        // latent tiles in the ring
  static constexpr int kRopeStages = kStages - 1;  // rope parts die one round earlier: QK reads them, PV does not
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr int kGroupRows = 16 * kMTiles;
  static constexpr int kTileRows = kGroupRows * kGroups;
  static constexpr int kWarps = 4 * kGroups;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kOwners = 2 * kMTiles;  // warps of a group that own 8 rows each in the softmax

  static constexpr int kLatentStage = kTileKeys * kLatent * 2;
  static constexpr int kRopeStage = kTileKeys * kRope * 2;
  static constexpr int kExchange = kOwners == 4 ? 6144 : 4096;  // a round's score pieces of a group
  static constexpr int kProbs = kMTiles * 512;         // a round's probabilities of a group
  static constexpr int kRescale = kGroupRows * 4;        // a round's factors of a group

  static constexpr int kLatentAt = 0;
  static constexpr int kRopeAt = kLatentAt + kStages * kLatentStage;
  static constexpr int kGroupAt = kRopeAt + kRopeStages * kRopeStage;
  static constexpr int kProbsAt = 2 * kExchange;  // within a group's part; the exchange comes first
  static constexpr int kGroupBytes = kProbsAt + 2 * kProbs;
  static constexpr int kRescaleAt = kGroupAt + kGroups * kGroupBytes;
  static constexpr int kFullAt = kRescaleAt + kGroups * 2 * kRescale;
  static constexpr int kEmptyAt = kFullAt + kStages * 8;
  static constexpr int kItemAt = kEmptyAt + kStages * 8;
  static constexpr int kSharedBytes = kItemAt + 48;
  static_assert(kSharedBytes <= kMaxSharedBytes);
};

}  // namespace kdt::cuda
