// The auto budget: how many drafted nodes each sequence verifies in the next step, and whether the drafter
// runs at all.
//
// One decision a step for all sequences together, made by the coordinator alone. Nodes are taken across all
// trees in the order of their expected gain while (expected tokens) / (expected step time) rises; both come
// from live measurements (AcceptanceModel, StepTimeModel). When plain decoding is faster, speculation goes
// off, the drafter included, and comes back when the load changes or a probe shows that it pays.
// Deterministic: no clock and no randomness of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "coordinator/ddtree/acceptance_model.h"
#include "coordinator/ddtree/ddtree.h"
#include "coordinator/ddtree/step_time_model.h"

namespace kdt {

// One running sequence of the next step.
struct BudgetRequest {
  const Tree* tree = nullptr;     // grown to the largest budget allowed; null or root only: nothing drafted
  std::optional<uint32_t> fixed;  // the request's own budget (0: off); unset: auto
};

enum class BudgetReason {
  kBest,            // the best rate by what is known
  kNothingDrafted,  // speculation is on, but no tree is there yet
  kExplore,         // another row count than the best, to learn its time
  kPlainFaster,     // off
  kProbe,           // off, trying whether speculation pays by now
  kFixed,           // no sequence asks for auto
};

struct BudgetDecision {
  std::vector<uint32_t> nodes;  // for each sequence: drafted nodes to verify (a prefix of its tree)
  bool draft = true;            // run the drafter in this step, for auto sequences (fixed ones: budget > 0)
  BudgetReason reason = BudgetReason::kBest;
  uint32_t total_nodes = 0;
  double expected_tokens = 0.0;   // roots included
  double expected_micros = 0.0;   // drafter included
  double speculative_rate = 0.0;  // best expected tokens a second with speculation
  double plain_rate = 0.0;        // and without
  // One line for the log: "budget 12 nodes over 2 sequences (best): 3.1 tokens in 8.2 ms, 378 tok/s, plain
  // 240".
  std::string ToString() const;
};

class BudgetController {
 public:
  // `step` gives prefill_rows, context_tokens and batch of the step to come; rows is ignored. At most
  // `max_nodes` nodes are handed out over all sequences (fixed ones first).
  BudgetDecision Decide(std::span<const BudgetRequest> requests, const StepShape& step, size_t max_nodes);

  // After the step, as it was run: see StepTimeModel::Observe.
  void ObserveStep(const StepShape& step, bool drafted, double micros, double draft_micros);
  // After the step, for each verified tree: see AcceptanceModel::Observe.
  void ObserveTree(const Tree& tree, size_t verified, std::span<const uint32_t> accepted);

  bool speculating() const { return on_; }
  const StepTimeModel& times() const { return times_; }

 private:
  // Everything a decision weighs: gains in the order in which nodes are taken, and what a step costs.
  struct Outlook {
    std::vector<uint32_t> order;  // which request gives the n-th node
    std::vector<double> tokens;   // [n]: expected tokens with n auto nodes
    uint32_t base_rows = 0;       // roots and fixed nodes
    RowCurve curve;
    double draft_micros = 0.0, plain_draft_micros = 0.0;
    double Rate(size_t nodes) const;  // tokens a microsecond with the drafter
    double PlainRate() const;
    size_t Best() const;
  };

  Outlook Weigh(std::span<const BudgetRequest> requests, const StepShape& step, size_t max_nodes,
                std::vector<uint32_t>* fixed_nodes);
  void Remember(const Outlook& outlook, size_t sequences, size_t best);
  // The best rate that speculation would have by the remembered gains; for when no trees are there.
  double RememberedRate(const Outlook& outlook, size_t sequences, size_t max_nodes) const;
  void UpdateMode(double speculative, double plain, bool plain_known);
  std::optional<size_t> Exploration(const Outlook& outlook, size_t best);
  size_t ProbeNodes(const Outlook& outlook, size_t best, size_t sequences) const;

  StepTimeModel times_;
  AcceptanceModel acceptance_;
  std::vector<std::vector<double>> gains_;  // of the decision in hand
  std::vector<double> remembered_gains_;    // of the n-th node of a sequence, mean
  // Of the best choice of late, while speculating at this load.
  double mean_tokens_ = 0.0, mean_micros_ = 0.0, mean_count_ = 0.0;
  bool on_ = true;
  uint64_t steps_ = 0;
  uint64_t mode_since_ = 0;
  int against_ = 0;  // consecutive decisions that spoke for the other mode
  uint32_t probe_steps_left_ = 0;
  uint64_t next_probe_ = 0;
  uint64_t probe_period_ = 0;
  int last_batch_bucket_ = -1;
  double exploration_credit_ = -1.0;  // microseconds; < 0: no step seen yet
};

}  // namespace kdt
