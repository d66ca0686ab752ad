// Shapes of the partial kernel for sequences of more than 32 query rows, and its shared memory.
#pragma once

#include "kernels/cuda/verify_attention/config.cuh"

namespace kdt::cuda {

// A block has two groups, which share the key tiles; a group works on kMTiles * 16 query rows: two score
// warps (QK and softmax) and four value warps (loading, P x V with probabilities of two bf16 parts).
// kBarriersAt_: where another configuration has as many barriers, in whose kernel this one runs; 0: anywhere.
template <int kMTiles_, int kBarriersAt_ = 0>
struct TallConfig {
  static constexpr bool kTall = true;
  static constexpr int kMTiles = kMTiles_;
  static constexpr int kGroups = 2;
  static constexpr int kStages = 4;       // key tiles in the ring
  static_assert(kStages % kGroups == 0);  // a stage is always loaded by the same group
  static constexpr int kMinBlocks = 1;
  static constexpr int kGroupRows = 16 * kMTiles;
  // Value warps begin with a round's products when the score warps are behind this step of sixteen of the
  // next round's, for products of both at once would hold up those that the next probabilities hang on.
  static constexpr bool kPaced = kMTiles == 2;
  static constexpr int kPaceStep = 8;
  static constexpr int kTileRows = kGroupRows * kGroups;
  static constexpr int kTileShift = kTileRows == 32 ? 5 : 6;
  static_assert(kTileRows == 1 << kTileShift);
  static constexpr int kScoreWarps = 2 * kGroups;
  static constexpr int kValueWarps = 4 * kGroups;
  static constexpr int kThreads = 32 * (kScoreWarps + kValueWarps);

  static constexpr int kKeyBytes = kKeyWidth * 2;
  static constexpr int kKeyRow = kKeyBytes + 16;  // rows start in different banks
  static constexpr int kStageBytes = kTileKeys * kKeyRow;
  static constexpr int kExchange = kGroupRows * kTileKeys * 4;  // scores that a group's score warps exchange
  static constexpr int kProbs = kGroupRows * kTileKeys * 4;     // in two parts
  static_assert(kProbs == kExchange);
  static constexpr int kFactors = kGroupRows * 4 + 8;  // and two words: which half of the rows they are for

  // What a group's score warps write, for its value warps (probabilities and factors in two buffers) or each
  // other. Scores, probabilities and rope parts of queries lie in pieces of 512 bytes, 16 a lane; of each two
  // times kMTiles pieces the first half is of score warp 0, the second of 1, so that a lane of theirs
  // has one address for all.
  static constexpr int kGroupAt = kStages * kStageBytes;
  static constexpr int kPiece = 512, kHalf = kMTiles * kPiece;
  static constexpr int kProbsAt = 2 * kExchange;                            // of a group
  static constexpr int kFragmentsAt = kProbsAt + 2 * kProbs;                // of a group: rope parts
  static constexpr int kFactorsAt = kFragmentsAt + kGroupRows * kRope * 2;  // of a group
  static constexpr int kReferencesAt = kFactorsAt + 2 * kFactors;  // of a group; at the end one over the sums
  // Rows of 128 bytes, swizzled, are what the rope parts come in.
  static constexpr int kGroupBytes = (kReferencesAt + kGroupRows * 4 + 127) / 128 * 128;
  static constexpr int kQueryRopeAt = kGroupAt + kFragmentsAt, kQueryRopeStep = kGroupBytes;
  static constexpr int kBarriersAt = kGroupAt + kGroups * kGroupBytes;
  static constexpr int kFullAt = kBarriersAt_ == 0 ? kBarriersAt : kBarriersAt_;
  static_assert(kFullAt >= kBarriersAt);
  static constexpr int kProbsFullAt = kFullAt + kStages * 8;
  static constexpr int kInversesFullAt = kProbsFullAt + kGroups * 2 * 8;
  static constexpr int kGoAt = kInversesFullAt + kGroups * 8;
  static constexpr int kItemAt = kGoAt + kGroups * 2 * 8;
  static constexpr int kSharedBytes = kItemAt + 48;
  static_assert(kSharedBytes <= kMaxSharedBytes);
  // Named barriers: one of the score warps, two a group for exchanged scores and probabilities that have been
  // read, and one a stage for tiles that have been read (why named ones:
  // config.cuh). The last, one a group for those that load, orders nothing: racecheck reports a copy behind
  // reads that a bar.arrive told of when the copying warp has been to as many bar.sync as the reading one had
  // been when it read. With it the numbers always differ.
  static constexpr int kQueryBarrier = 1, kExchangeBarrier = kQueryBarrier + 1,
                       kTileBarrier = kExchangeBarrier + 2 * kGroups, kLoadBarrier = kTileBarrier + kStages;
  static_assert(kLoadBarrier + kGroups <= 16);
  // Each score warp brings its queries in through private pieces of the ring's last stage, which is loaded
  // last, as many of their four parts at a time as fit.
  static constexpr int kStagingAt = (kStages - 1) * kStageBytes;
  static constexpr int kStagingPiece = kGroupRows * 128;
  static constexpr int kStagingParts = kTileKeys * kLatent * 2 / (kScoreWarps * kStagingPiece);
  static_assert(kStagingParts == 1 || kStagingParts == 2 || kStagingParts == 4);
};

}  // namespace kdt::cuda
