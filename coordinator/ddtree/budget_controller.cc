#include "coordinator/ddtree/budget_controller.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "absl/strings/str_format.h"

namespace kdt {
namespace {

// Exploring may cost this share of the time of all steps, and a little more at once when everything is new.
constexpr double kExplorationShare = 0.015;
constexpr double kFirstCreditSteps = 12.0;  // the first step's duration, so many times
constexpr double kMostCreditSteps = 8.0;
constexpr double kChangeCreditSteps = 4.0;  // when the machine has changed

// No further beyond the rows seen so far than this at once: how steep t is there nobody knows.
constexpr double kExplorationStride = 2.0;

// Another mode must be better by this much, for so many decisions in a row (or by kPlainly, at once), and a
// mode lasts at least kDwellSteps: speculation must not flap between two equal choices.
constexpr double kMargin = 1.03;
constexpr double kPlainly = 1.15;
constexpr int kAgreeing = 8;
constexpr uint64_t kDwellSteps = 16;

// A probe is one step that drafts and three that verify a tree; at most 2% of the steps are probe steps.
constexpr uint32_t kProbeSteps = 4;
constexpr uint64_t kProbePeriod = 200;
constexpr uint64_t kMostProbePeriod = 1600;
constexpr size_t kProbeNodesEach = 4;

constexpr double kRememberShare = 0.05;

int BatchBucket(size_t batch) { return static_cast<int>(std::bit_width(batch)); }

const char* ReasonText(BudgetReason reason) {
  switch (reason) {
    case BudgetReason::kBest:
      return "best";
    case BudgetReason::kNothingDrafted:
      return "nothing drafted yet";
    case BudgetReason::kExplore:
      return "exploring";
    case BudgetReason::kPlainFaster:
      return "plain decoding is faster";
    case BudgetReason::kProbe:
      return "probing whether speculation pays";
    case BudgetReason::kFixed:
      return "fixed";
  }
  return "";
}

}  // namespace

std::string BudgetDecision::ToString() const {
  return absl::StrFormat(
      "budget %d nodes over %d sequences (%s)%s: %.2f tokens in %.2f ms, %.0f tok/s, plain %.0f", total_nodes,
      nodes.size(), ReasonText(reason), draft ? "" : ", no draft", expected_tokens, expected_micros / 1e3,
      speculative_rate, plain_rate);
}

double BudgetController::Outlook::Rate(size_t nodes) const {
  return tokens[nodes] / (curve.Micros(base_rows + static_cast<uint32_t>(nodes)) + draft_micros);
}

double BudgetController::Outlook::PlainRate() const {
  return tokens[0] / (curve.Micros(base_rows) + plain_draft_micros);
}

// The whole range is searched, not the first rise: t may have plateaus (captured graphs) and may flatten out
// (experts).
size_t BudgetController::Outlook::Best() const {
  size_t best = 0;
  for (size_t n = 1; n < tokens.size(); ++n) {
    if (Rate(n) > Rate(best)) best = n;
  }
  return best;
}

BudgetController::Outlook BudgetController::Weigh(std::span<const BudgetRequest> requests,
                                                  const StepShape& step, size_t max_nodes,
                                                  std::vector<uint32_t>* fixed_nodes) {
  Outlook outlook;
  const size_t count = requests.size();
  fixed_nodes->assign(count, 0);
  gains_.resize(std::max(gains_.size(), count));
  double tokens = static_cast<double>(count);
  size_t left = max_nodes;
  for (size_t i = 0; i < count; ++i) {
    gains_[i].clear();
    if (requests[i].tree == nullptr) continue;
    acceptance_.Gains(*requests[i].tree, &gains_[i]);
    if (!requests[i].fixed) continue;
    const size_t nodes = std::min({static_cast<size_t>(*requests[i].fixed), gains_[i].size(), left});
    (*fixed_nodes)[i] = static_cast<uint32_t>(nodes);
    left -= nodes;
    tokens =
        std::accumulate(gains_[i].begin(), gains_[i].begin() + static_cast<std::ptrdiff_t>(nodes), tokens);
    outlook.base_rows += static_cast<uint32_t>(nodes);
  }
  outlook.base_rows += static_cast<uint32_t>(count);

  // Merge of the auto sequences' gains, largest first; within a tree the order is the tree's own.
  struct Next {
    double gain;
    uint32_t request, node;
    // Equal gains: the earlier sequence first, so that every run decides alike.
    bool operator<(const Next& other) const {
      return gain != other.gain ? gain < other.gain : request > other.request;
    }
  };
  std::vector<Next> heap;
  for (size_t i = 0; i < count; ++i) {
    if (!requests[i].fixed && !gains_[i].empty()) heap.push_back({gains_[i][0], static_cast<uint32_t>(i), 0});
  }
  std::make_heap(heap.begin(), heap.end());
  outlook.tokens.push_back(tokens);
  while (!heap.empty() && outlook.order.size() < left) {
    std::pop_heap(heap.begin(), heap.end());
    Next& next = heap.back();
    tokens += next.gain;
    outlook.order.push_back(next.request);
    outlook.tokens.push_back(tokens);
    const std::vector<double>& gains = gains_[next.request];
    if (++next.node < gains.size()) {
      next.gain = gains[next.node];
      std::push_heap(heap.begin(), heap.end());
    } else {
      heap.pop_back();
    }
  }
  outlook.curve = times_.Curve(step);
  outlook.draft_micros = times_.DraftMicros(step, true);
  outlook.plain_draft_micros = times_.DraftMicros(step, false);
  return outlook;
}

// Keeps the mean of what the n-th node of a sequence was worth, for decisions without trees at hand.
void BudgetController::Remember(const Outlook& outlook, size_t sequences, size_t best) {
  if (outlook.order.empty() || times_.steps() == 0) return;
  const double tokens = outlook.tokens[best], micros = tokens / outlook.Rate(best);
  // A plain mean at first, so that an early misjudgement is soon outweighed.
  const double share = std::max(1.0 / ++mean_count_, kRememberShare);
  mean_tokens_ += share * (tokens - mean_tokens_);
  mean_micros_ += share * (micros - mean_micros_);
  const size_t each = outlook.order.size() / sequences;
  if (remembered_gains_.size() < each) remembered_gains_.resize(each, -1.0);
  for (size_t n = 0; n < each; ++n) {
    const double mean = (outlook.tokens[(n + 1) * sequences] - outlook.tokens[n * sequences]) /
                        static_cast<double>(sequences);
    double& kept = remembered_gains_[n];
    kept = kept < 0.0 ? mean : kept + kRememberShare * (mean - kept);
  }
}

double BudgetController::RememberedRate(const Outlook& outlook, size_t sequences, size_t max_nodes) const {
  double best = outlook.Rate(0);
  double tokens = outlook.tokens[0];
  for (size_t n = 0; n < remembered_gains_.size() && (n + 1) * sequences <= max_nodes; ++n) {
    tokens += std::max(remembered_gains_[n], 0.0) * static_cast<double>(sequences);
    const uint32_t rows = outlook.base_rows + static_cast<uint32_t>((n + 1) * sequences);
    best = std::max(best, tokens / (outlook.curve.Micros(rows) + outlook.draft_micros));
  }
  return best;
}

void BudgetController::UpdateMode(double speculative, double plain, bool plain_known) {
  const double other = on_ ? plain / speculative : speculative / plain;
  const bool for_other = other > kMargin && (plain_known || !on_);
  against_ = for_other ? against_ + 1 : 0;
  if (steps_ < mode_since_ + kDwellSteps || !for_other) return;
  if (against_ < kAgreeing && other < kPlainly) return;
  on_ = !on_;
  against_ = 0;
  mean_count_ = 0;
  mode_since_ = steps_;
  probe_steps_left_ = 0;
  probe_period_ = kProbePeriod;
  next_probe_ = steps_ + kProbePeriod;
}

// A row count that might be better than the best by what could still be true of it, if its cost can be
// afforded.
std::optional<size_t> BudgetController::Exploration(const Outlook& outlook, size_t best) {
  if (exploration_credit_ <= 0.0) return std::nullopt;
  const double best_rate = outlook.Rate(best);
  std::optional<size_t> choice;
  double choice_promise = 1.0, choice_cost = 0.0;
  uint32_t next = 0;
  for (const uint32_t rows : kRowKnots) {
    if (rows < next) continue;
    next = rows + std::max(rows / 4, 1u);
    // The root-only step is always of interest: it is what plain decoding is judged by.
    const uint32_t wanted = std::max(rows, outlook.base_rows);
    const size_t nodes = wanted - outlook.base_rows;
    if (nodes >= outlook.tokens.size() || wanted > kExplorationStride * outlook.curve.most_rows_seen()) break;
    if (nodes == best || outlook.curve.Known(wanted)) continue;
    const double drafter = nodes == 0 ? outlook.plain_draft_micros : outlook.draft_micros;
    const double promise =
        outlook.tokens[nodes] / (outlook.curve.OptimisticMicros(wanted) + drafter) / best_rate;
    const double cost = std::max(
        outlook.curve.Micros(wanted) + outlook.draft_micros - outlook.tokens[nodes] / best_rate, 0.0);
    if (cost > exploration_credit_ || promise <= choice_promise) continue;
    choice = nodes;
    choice_promise = promise;
    choice_cost = cost;
  }
  if (choice) exploration_credit_ -= choice_cost;
  return choice;
}

size_t BudgetController::ProbeNodes(const Outlook& outlook, size_t best, size_t sequences) const {
  return std::min(std::max(best, kProbeNodesEach * sequences), outlook.order.size());
}

BudgetDecision BudgetController::Decide(std::span<const BudgetRequest> requests, const StepShape& step,
                                        size_t max_nodes) {
  ++steps_;
  BudgetDecision decision;
  const Outlook outlook = Weigh(requests, step, max_nodes, &decision.nodes);
  const size_t autos = static_cast<size_t>(
      std::count_if(requests.begin(), requests.end(), [](const auto& r) { return !r.fixed; }));
  size_t nodes = 0;
  const size_t best = outlook.Best();
  double speculative = outlook.Rate(best);
  const double plain = outlook.PlainRate();
  if (autos == 0) {
    decision.reason = BudgetReason::kFixed;
  } else {
    if (BatchBucket(autos) != last_batch_bucket_) {
      // Another load is another question: ask again soon.
      last_batch_bucket_ = BatchBucket(autos);
      mean_count_ = 0;
      probe_period_ = kProbePeriod;
      next_probe_ = std::min(next_probe_, steps_ + kProbePeriod);
    }
    Remember(outlook, autos, best);
    // One tree is more promising than the next; the mode goes by what trees are worth on the whole.
    speculative =
        on_ && mean_count_ > 0 ? mean_tokens_ / mean_micros_ : RememberedRate(outlook, autos, max_nodes);
    UpdateMode(speculative, plain, outlook.curve.Known(outlook.base_rows));
    if (on_) {
      nodes = best;
      decision.reason = outlook.order.empty() ? BudgetReason::kNothingDrafted : BudgetReason::kBest;
      if (const std::optional<size_t> other = Exploration(outlook, best)) {
        nodes = *other;
        decision.reason = BudgetReason::kExplore;
      }
    } else {
      decision.reason = BudgetReason::kPlainFaster;
      if (probe_steps_left_ == 0 && steps_ >= next_probe_) {
        probe_steps_left_ = kProbeSteps;
        next_probe_ = steps_ + probe_period_;
        probe_period_ = std::min(2 * probe_period_, kMostProbePeriod);
      }
      decision.draft = probe_steps_left_ > 1;
      if (probe_steps_left_ > 0) {
        --probe_steps_left_;
        decision.reason = BudgetReason::kProbe;
        nodes = ProbeNodes(outlook, best, autos);
      }
    }
  }
  for (size_t n = 0; n < nodes; ++n) ++decision.nodes[outlook.order[n]];
  decision.total_nodes = std::accumulate(decision.nodes.begin(), decision.nodes.end(), 0u);
  decision.expected_tokens = outlook.tokens[nodes];
  decision.expected_micros = outlook.curve.Micros(outlook.base_rows + static_cast<uint32_t>(nodes)) +
                             (decision.draft ? outlook.draft_micros : outlook.plain_draft_micros);
  decision.speculative_rate = speculative * 1e6;
  decision.plain_rate = plain * 1e6;
  return decision;
}

void BudgetController::ObserveStep(const StepShape& step, bool drafted, double micros, double draft_micros) {
  const bool changed = times_.Observe(step, drafted, micros, draft_micros);
  const double whole = micros + draft_micros;
  if (!std::isfinite(whole) || whole <= 0.0) return;
  if (exploration_credit_ < 0.0) exploration_credit_ = kFirstCreditSteps * whole;
  if (changed) {
    exploration_credit_ = std::max(exploration_credit_, kChangeCreditSteps * whole);
    probe_period_ = kProbePeriod;
    next_probe_ = std::min(next_probe_, steps_ + kDwellSteps);
  }
  // Credit beyond the cap is not taken away, only no more is added.
  if (exploration_credit_ < kMostCreditSteps * whole) exploration_credit_ += kExplorationShare * whole;
}

void BudgetController::ObserveTree(const Tree& tree, size_t verified, std::span<const uint32_t> accepted) {
  acceptance_.Observe(tree, verified, accepted, steps_);
}

}  // namespace kdt
