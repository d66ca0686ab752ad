#include "coordinator/ddtree/ddtree.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace kdt {
namespace {

constexpr struct {
  TreePolicy policy;
  const char* name;
} kPolicies[] = {{TreePolicy::kBestFirst, "best-first"},
                 {TreePolicy::kSpineFirst, "spine-first"},
                 {TreePolicy::kChain, "chain"}};

}  // namespace

absl::StatusOr<TreePolicy> ParseTreePolicy(absl::string_view name) {
  for (const auto& known : kPolicies) {
    if (name == known.name) return known.policy;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("tree policy \"", name, "\" is not one of best-first, spine-first, chain"));
}

absl::string_view TreePolicyName(TreePolicy policy) { return kPolicies[static_cast<size_t>(policy)].name; }

// Python's order of rank tuples: the first difference decides, a prefix comes before what it begins.
int TreeBuilder::CompareRanks(const Candidate& a, const Candidate& b) const {
  const size_t depth_a = tree_.depths[a.parent], depth_b = tree_.depths[b.parent];
  const uint32_t* path_a = path_ranks_.data() + a.parent * depth_;
  const uint32_t* path_b = path_ranks_.data() + b.parent * depth_;
  for (size_t i = 0;; ++i) {
    const bool last_a = i == depth_a, last_b = i == depth_b;
    const uint32_t rank_a = last_a ? a.rank : path_a[i];
    const uint32_t rank_b = last_b ? b.rank : path_b[i];
    if (rank_a != rank_b) return rank_a < rank_b ? -1 : 1;
    if (last_a || last_b) return static_cast<int>(last_b) - static_cast<int>(last_a);
  }
}

bool TreeBuilder::Before(const Candidate& a, const Candidate& b) const {
  if (a.log_prob != b.log_prob) return a.log_prob > b.log_prob;
  return CompareRanks(a, b) < 0;
}

void TreeBuilder::Push(Candidate candidate) {
  // Not finite: an impossible token, or a drafter gone wrong. Neither belongs into a tree.
  if (!std::isfinite(candidate.log_prob)) return;
  size_t hole = heap_.size();
  heap_.push_back(candidate);
  while (hole > 0) {
    const size_t up = (hole - 1) / 2;
    if (!Before(candidate, heap_[up])) break;
    heap_[hole] = heap_[up];
    hole = up;
  }
  heap_[hole] = candidate;
}

TreeBuilder::Candidate TreeBuilder::Pop() {
  const Candidate best = heap_.front();
  const Candidate last = heap_.back();
  heap_.pop_back();
  const size_t size = heap_.size();
  if (size == 0) return best;
  size_t hole = 0;
  for (size_t child = 1; child < size; child = 2 * hole + 1) {
    if (child + 1 < size && Before(heap_[child + 1], heap_[child])) ++child;
    if (!Before(heap_[child], last)) break;
    heap_[hole] = heap_[child];
    hole = child;
  }
  heap_[hole] = last;
  return best;
}

uint32_t TreeBuilder::AddNode(const Candidate& candidate) {
  const uint32_t node = static_cast<uint32_t>(tree_.size());
  const uint32_t depth = tree_.depths[candidate.parent] + 1;
  tree_.tokens.push_back(tokens_[(depth - 1) * k_ + candidate.rank]);
  tree_.parents.push_back(static_cast<int32_t>(candidate.parent));
  tree_.depths.push_back(depth);
  tree_.ranks.push_back(candidate.rank);
  tree_.log_probs.push_back(candidate.log_prob);
  uint32_t* path = path_ranks_.data() + node * depth_;
  std::copy_n(path_ranks_.data() + candidate.parent * depth_, depth - 1, path);
  path[depth - 1] = candidate.rank;
  return node;
}

void TreeBuilder::PushSibling(const Candidate& candidate) {
  if (candidate.rank + 1 >= k_) return;
  const size_t depth = tree_.depths[candidate.parent] + 1;
  // Exchanging the last term, in this order, is what the published code does; another order rounds other ties
  // apart.
  const double log_prob =
      candidate.log_prob - LogProb(depth, candidate.rank) + LogProb(depth, candidate.rank + 1);
  Push({log_prob, candidate.parent, candidate.rank + 1});
}

void TreeBuilder::PushChild(uint32_t node) {
  const size_t depth = tree_.depths[node];
  if (depth < depth_) Push({tree_.log_probs[node] + LogProb(depth + 1, 0), node, 0});
}

absl::StatusOr<const Tree*> TreeBuilder::Build(TreePolicy policy, uint32_t root_token,
                                               const DraftGuesses& guesses, size_t budget) {
  const size_t cells = guesses.depth * guesses.k;
  if (guesses.tokens.size() != cells || guesses.log_probs.size() != cells) {
    return absl::InvalidArgumentError(absl::StrCat("draft top-k of ", guesses.depth, " positions x ",
                                                   guesses.k, " has ", guesses.tokens.size(), " tokens and ",
                                                   guesses.log_probs.size(), " log-probabilities"));
  }
  tokens_ = guesses.tokens.data();
  log_probs_ = guesses.log_probs.data();
  depth_ = guesses.depth;
  k_ = guesses.k;
  heap_.clear();
  if (path_ranks_.size() < (budget + 1) * depth_) path_ranks_.resize((budget + 1) * depth_);
  tree_.tokens.assign(1, root_token);
  tree_.parents.assign(1, -1);
  tree_.depths.assign(1, 0);
  tree_.ranks.assign(1, 0);
  tree_.log_probs.assign(1, 0.0);
  if (cells == 0) return &tree_;

  if (policy == TreePolicy::kBestFirst) {
    PushChild(0);
  } else {
    uint32_t node = 0;
    while (tree_.drafted() < std::min(budget, depth_)) {
      const Candidate next{tree_.log_probs[node] + LogProb(tree_.depths[node] + 1, 0), node, 0};
      if (!std::isfinite(next.log_prob)) break;
      node = AddNode(next);
      if (policy == TreePolicy::kSpineFirst) PushSibling(next);
    }
  }
  while (tree_.drafted() < budget && !heap_.empty()) {
    const Candidate best = Pop();
    const uint32_t node = AddNode(best);
    PushSibling(best);
    PushChild(node);
  }
  return &tree_;
}

size_t AncestorRows(std::span<const int32_t> parents, std::vector<uint64_t>* rows) {
  const size_t size = parents.size();
  const size_t words = (size + 63) / 64;
  rows->resize(size * words);
  uint64_t* row = rows->data();
  for (size_t node = 0; node < size; ++node, row += words) {
    if (parents[node] < 0) {
      std::fill_n(row, words, 0);
    } else {
      std::copy_n(rows->data() + static_cast<size_t>(parents[node]) * words, words, row);
    }
    row[node / 64] |= uint64_t{1} << (node % 64);
  }
  return words;
}

}  // namespace kdt
