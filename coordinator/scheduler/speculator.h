// Grows the draft trees of a step and decides how much of each is verified.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "coordinator/ddtree/budget_controller.h"
#include "coordinator/ddtree/ddtree.h"
#include "coordinator/group/group.h"
#include "coordinator/scheduler/sample.h"

namespace kdt {

struct SpeculationOptions {
  TreePolicy policy = TreePolicy::kBestFirst;
  std::optional<uint32_t> budget;  // drafted nodes a tree; unset: auto
  // Told of every verified tree, on the scheduler's thread, while sample.draft is still what it was grown
  // from; may be null.
  std::function<void(const Sample& sample, std::span<const uint32_t> accepted_nodes)> on_verified;
};

class Speculator {
 public:
  explicit Speculator(const SpeculationOptions& options) : options_(options) {}

  // What was learnt about step times is kept: the same machines come back in a new epoch.
  void Reset(const GroupLimits& limits) { limits_ = limits; }

  // For the samples that decode in the step to come: sets `tree` and `nodes` of each, with at most
  // `max_nodes` nodes in all. `prefill_rows` share the step.
  void Plan(std::span<Sample* const> roots, uint32_t prefill_rows, size_t max_nodes);
  // Guesses a position to ask the drafter for behind the sample's next token; 0: no draft. After Plan.
  uint32_t DraftTopK(const Sample& sample) const;

  // After the step of the last Plan. `step_us`: its duration, the coordinator's part included; `draft_us` of
  // it was the drafter's.
  void ObserveStep(double step_us, double draft_us);
  void ObserveTree(const Sample& sample, std::span<const uint32_t> accepted_nodes);

  const BudgetDecision& decision() const { return decision_; }
  double last_build_us() const { return build_us_; }

 private:
  bool Enabled(const Sample& sample) const;
  TreePolicy PolicyOf(const Sample& sample) const;
  std::optional<uint32_t> BudgetOf(const Sample& sample) const;
  uint32_t LargestTree(const Sample& sample, size_t batch) const;
  void Grow(Sample* sample, size_t batch);
  void LogDecision();

  const SpeculationOptions options_;
  GroupLimits limits_;
  BudgetController controller_;
  BudgetDecision decision_;
  std::vector<BudgetRequest> requests_;
  StepShape shape_;
  bool drafted_ = false;
  size_t batch_ = 1;
  double build_us_ = 0;
  int64_t logged_us_ = 0;
};

}  // namespace kdt
