#include "coordinator/scheduler/speculator.h"

#include <algorithm>

#include "common/clock.h"
#include "common/log.h"
#include "common/status.h"

namespace kdt {
namespace {

// With an automatic budget, trees are grown no larger than a busy step could use: the nodes of all trees of a
// step share the rows, and growing costs time between two steps.
constexpr size_t kAutoNodesAStep = 256;
constexpr uint32_t kFewestAutoNodes = 8;
constexpr int64_t kLogEveryUs = 10'000'000;

}  // namespace

bool Speculator::Enabled(const Sample& sample) const {
  return limits_.draft_block_size > 1 && limits_.max_draft_top_k > 0 && limits_.max_tree_nodes > 1 &&
         sample.request->spec.mode != SpeculationMode::kOff && BudgetOf(sample) != std::optional<uint32_t>(0);
}

TreePolicy Speculator::PolicyOf(const Sample& sample) const {
  switch (sample.request->spec.mode) {
    case SpeculationMode::kChain:
      return TreePolicy::kChain;
    case SpeculationMode::kTree:
      return options_.policy == TreePolicy::kChain ? TreePolicy::kBestFirst : options_.policy;
    case SpeculationMode::kDefault:
    case SpeculationMode::kOff:
      break;
  }
  return options_.policy;
}

std::optional<uint32_t> Speculator::BudgetOf(const Sample& sample) const {
  const auto& spec = sample.request->spec;
  return spec.budget.has_value() ? spec.budget : options_.budget;
}

uint32_t Speculator::LargestTree(const Sample& sample, size_t batch) const {
  const auto automatic =
      static_cast<uint32_t>(std::max<size_t>(kFewestAutoNodes, kAutoNodesAStep / std::max<size_t>(batch, 1)));
  return std::min(limits_.max_tree_nodes - 1, BudgetOf(sample).value_or(automatic));
}

uint32_t Speculator::DraftTopK(const Sample& sample) const {
  if (!Enabled(sample)) return 0;
  if (!BudgetOf(sample).has_value() && !decision_.draft) return 0;
  if (PolicyOf(sample) == TreePolicy::kChain) return 1;
  // A tree of n nodes never reaches beyond the n-th guess of a position.
  return std::min(limits_.max_draft_top_k, LargestTree(sample, batch_));
}

void Speculator::Grow(Sample* sample, size_t batch) {
  sample->tree = nullptr;
  sample->nodes = 0;
  const v1::DraftTopK& draft = sample->draft;
  if (!Enabled(*sample) || draft.k() == 0) return;
  // Neither deeper than the tokens still wanted behind this round's own one, nor over the end of the context.
  const uint32_t wanted = sample->request->spec.max_tokens - sample->kept - 1;
  const uint32_t positions =
      limits_.max_context == 0 ? UINT32_MAX : limits_.max_context - sample->committed - 1;
  DraftGuesses guesses;
  guesses.k = draft.k();
  guesses.depth =
      std::min<size_t>({static_cast<size_t>(draft.token_ids_size()) / draft.k(), wanted, positions});
  guesses.tokens = std::span(draft.token_ids().data(), guesses.depth * guesses.k);
  guesses.log_probs = std::span(draft.log_probs().data(), guesses.depth * guesses.k);
  const size_t budget = std::min<size_t>(LargestTree(*sample, batch), positions);
  const auto tree = sample->tree_builder.Build(PolicyOf(*sample), sample->tokens.back(), guesses, budget);
  KDT_CHECK(tree.ok());  // the answer's shape was checked when it came
  sample->tree = *tree;
}

void Speculator::Plan(std::span<Sample* const> roots, uint32_t prefill_rows, size_t max_nodes) {
  batch_ = roots.size();
  shape_ = StepShape{0, prefill_rows, 0, static_cast<uint32_t>(roots.size())};
  drafted_ = false;
  if (roots.empty()) {
    decision_ = {};
    decision_.draft = controller_.speculating();
    return;
  }
  const int64_t start_us = MonotonicMicros();
  requests_.clear();
  for (Sample* sample : roots) {
    Grow(sample, roots.size());
    shape_.context_tokens += sample->committed;
    requests_.push_back({sample->tree, Enabled(*sample) ? BudgetOf(*sample) : 0});
  }
  decision_ = controller_.Decide(requests_, shape_, max_nodes);
  shape_.rows = shape_.batch;
  for (size_t i = 0; i < roots.size(); ++i) {
    const size_t grown = roots[i]->tree == nullptr ? 0 : roots[i]->tree->drafted();
    roots[i]->nodes = static_cast<uint32_t>(std::min<size_t>(decision_.nodes[i], grown));
    shape_.rows += roots[i]->nodes;
    drafted_ = drafted_ || DraftTopK(*roots[i]) > 0;
  }
  build_us_ = static_cast<double>(MonotonicMicros() - start_us);
  LogDecision();
}

// Each decision at debug level; what it has come to, every few seconds, for everybody.
void Speculator::LogDecision() {
  const bool automatic = decision_.reason != BudgetReason::kFixed;
  const int64_t now_us = MonotonicMicros();
  if (automatic && now_us - logged_us_ >= kLogEveryUs) {
    logged_us_ = now_us;
    spdlog::info("{}", decision_.ToString());
  } else if (spdlog::should_log(spdlog::level::debug)) {
    spdlog::debug("{}", decision_.ToString());
  }
}

void Speculator::ObserveStep(double step_us, double draft_us) {
  if (shape_.batch == 0) return;
  controller_.ObserveStep(shape_, drafted_, step_us - draft_us, draft_us);
}

void Speculator::ObserveTree(const Sample& sample, std::span<const uint32_t> accepted_nodes) {
  if (sample.tree == nullptr || sample.nodes == 0) return;
  controller_.ObserveTree(*sample.tree, sample.nodes, accepted_nodes);
  if (options_.on_verified) options_.on_verified(sample, accepted_nodes);
}

}  // namespace kdt
