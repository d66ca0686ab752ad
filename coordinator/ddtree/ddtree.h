// DDTree: grows the draft tree of one sequence from the drafter's guesses.
//
// The drafter gives, for each block position i = 1..L, the k most probable tokens with log-probabilities that
// do not depend on the path. A path of ranks (r1, r2, ...) has the sum of their log-probabilities; the best
// tree of n nodes is the n most probable paths, and its expected number of accepted tokens is the sum of
// their probabilities.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kdt {

enum class TreePolicy {
  kBestFirst,   // the published algorithm: most probable path first
  kSpineFirst,  // the top-1 chain to full depth, then best-first for the rest
  kChain,       // the top-1 chain alone
};

// "best-first", "spine-first", "chain"; INVALID_ARGUMENT for anything else.
absl::StatusOr<TreePolicy> ParseTreePolicy(absl::string_view name);
absl::string_view TreePolicyName(TreePolicy policy);

// The drafter's guesses, row-major [depth, k], best first in each row; as DraftTopK of the internal API.
struct DraftGuesses {
  size_t depth = 0;  // L = block size - 1; may be 0
  size_t k = 0;
  std::span<const uint32_t> tokens;  // [depth * k]
  std::span<const float> log_probs;  // [depth * k]
};

// A tree in structure-of-arrays form; index 0 is the root. Built trees are nested: the first n + 1 entries
// are the tree of budget n under the same policy.
struct Tree {
  std::vector<uint32_t> tokens;
  std::vector<int32_t> parents;   // -1 for the root; parents[i] < i
  std::vector<uint32_t> depths;   // 0 for the root
  std::vector<uint32_t> ranks;    // which of its position's guesses; 0 for the root
  std::vector<double> log_probs;  // of the whole path; 0 for the root

  size_t size() const { return tokens.size(); }         // nodes, root included
  size_t drafted() const { return tokens.size() - 1; }  // root not counted
};

// Builds trees in buffers of its own: no allocation after the first tree of a size. One thread at a time.
class TreeBuilder {
 public:
  // Tree of at most `budget` drafted nodes under `root_token`; valid until the next Build. Fewer nodes when
  // the guesses hold no more paths. Paths of log-probability that is not finite are left out. Ties of the sum
  // (kept in double, as published) are broken by the lexicographic order of rank tuples. INVALID_ARGUMENT
  // when the spans' sizes are not depth * k.
  absl::StatusOr<const Tree*> Build(TreePolicy policy, uint32_t root_token, const DraftGuesses& guesses,
                                    size_t budget);

 private:
  // A path that is not in the tree yet: `rank` at `depth` below node `parent`.
  struct Candidate {
    double log_prob;
    uint32_t parent;
    uint32_t rank;
  };

  bool Before(const Candidate& a, const Candidate& b) const;
  int CompareRanks(const Candidate& a, const Candidate& b) const;
  void Push(Candidate candidate);
  Candidate Pop();
  uint32_t AddNode(const Candidate& candidate);
  void PushSibling(const Candidate& candidate);
  void PushChild(uint32_t node);
  double LogProb(size_t depth, size_t rank) const { return log_probs_[(depth - 1) * k_ + rank]; }

  Tree tree_;
  std::vector<Candidate> heap_;
  std::vector<uint32_t> path_ranks_;  // [node, depth of the tree]: the ranks from the root down to each node
  const uint32_t* tokens_ = nullptr;
  const float* log_probs_ = nullptr;
  size_t depth_ = 0, k_ = 0;
};

// Rows of ancestor bits: row i has bit j (word j / 64, bit j % 64) set when node j is an ancestor of node i
// or i itself. Every row has `words` = ceil(size / 64) words. `rows` is resized to size * words. parents[0] =
// -1, parents[i] < i.
size_t AncestorRows(std::span<const int32_t> parents, std::vector<uint64_t>* rows);

}  // namespace kdt
