// A synthetic machine and drafter for the budget controller's tests: step times from a formula with some
// noise, acceptances drawn from the drafter's probabilities times a factor. Deterministic.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <vector>

#include "common/rng.h"
#include "coordinator/ddtree/budget_controller.h"

namespace kdt {

struct Machine {
  std::function<double(uint32_t rows)> micros;
  double draft_micros = 0.0;        // when drafting
  double plain_draft_micros = 0.0;  // keeping the drafter's context
  double noise = 0.05;              // uniform, +- this share
  double truth = 1.0;               // acceptance = the drafter's probability times this
};

class Simulation {
 public:
  static constexpr size_t kDepth = 7, kTopK = 8, kMaxBudget = 64;

  explicit Simulation(uint64_t seed) : seed_(seed) {}

  BudgetController controller;
  double micros = 0.0, tokens = 0.0;  // since the last Reset
  uint64_t steps = 0, probes = 0, explorations = 0, switches = 0, plain_steps = 0;
  BudgetDecision last;

  void Reset() { micros = tokens = 0.0, steps = probes = explorations = switches = plain_steps = 0; }

  // Runs `count` steps of `batch` sequences. `fixed`: every sequence has this budget, the controller only
  // passes it on.
  void Run(const Machine& machine, uint32_t batch, uint64_t count,
           std::optional<uint32_t> fixed = std::nullopt) {
    for (uint64_t i = 0; i < count; ++i) Step(machine, batch, fixed);
  }

  double Rate() const { return tokens / micros; }

 private:
  double Uniform() {
    const uint32_t word = NoiseWords(seed_, ++draws_, 0).word[0];
    return (word + 0.5) * 0x1p-32;
  }

  // Guesses whose best has probability around 0.75 at the first position and less further on.
  const Tree* Grow(TreeBuilder& builder) {
    std::vector<uint32_t> ids(kDepth * kTopK);
    std::vector<float> log_probs;
    for (size_t d = 0; d < kDepth; ++d) {
      double p = std::min(0.97, 0.45 + 0.55 * Uniform()) * std::pow(0.96, static_cast<double>(d));
      double rest = 1.0;
      for (size_t j = 0; j < kTopK; ++j) {
        log_probs.push_back(static_cast<float>(std::log(rest * p)));
        rest *= 1.0 - p;
        p = std::min(p, 0.5);
      }
      std::sort(log_probs.end() - kTopK, log_probs.end(), std::greater<>());
    }
    return *builder.Build(TreePolicy::kBestFirst, 0, {kDepth, kTopK, ids, log_probs}, kMaxBudget);
  }

  std::vector<uint32_t> Accept(const Machine& machine, const Tree& tree, uint32_t verified) {
    std::vector<uint32_t> path;
    uint32_t at = 0;
    for (bool moved = true; moved;) {
      moved = false;
      double u = Uniform();
      for (uint32_t node = at + 1; node <= verified && !moved; ++node) {
        if (tree.parents[node] != static_cast<int32_t>(at)) continue;
        u -= machine.truth * std::exp(tree.log_probs[node] - tree.log_probs[at]);
        if (u >= 0.0) continue;
        path.push_back(node);
        at = node;
        moved = true;
      }
    }
    return path;
  }

  void Step(const Machine& machine, uint32_t batch, std::optional<uint32_t> fixed) {
    builders_.resize(std::max<size_t>(builders_.size(), batch));
    std::vector<BudgetRequest> requests(batch);
    for (uint32_t i = 0; i < batch; ++i) {
      requests[i] = {drafted_ ? Grow(builders_[i]) : nullptr, fixed};
    }
    StepShape shape{.context_tokens = 500ull * batch, .batch = batch};
    const bool was_on = controller.speculating();
    last = controller.Decide(requests, shape, 1000);
    const bool draft = fixed ? *fixed > 0 : last.draft;
    shape.rows = batch + last.total_nodes;
    const double noise = 1.0 + machine.noise * (2.0 * Uniform() - 1.0);
    const double verify = machine.micros(shape.rows) * noise;
    const double drafting = draft ? machine.draft_micros : machine.plain_draft_micros;
    for (uint32_t i = 0; i < batch; ++i) {
      tokens += 1.0;
      if (last.nodes[i] == 0) continue;
      const std::vector<uint32_t> path = Accept(machine, *requests[i].tree, last.nodes[i]);
      tokens += static_cast<double>(path.size());
      controller.ObserveTree(*requests[i].tree, last.nodes[i], path);
    }
    controller.ObserveStep(shape, draft, verify, drafting);
    micros += verify + drafting;
    ++steps;
    probes += last.reason == BudgetReason::kProbe;
    explorations += last.reason == BudgetReason::kExplore;
    switches += was_on != controller.speculating();
    plain_steps += last.reason == BudgetReason::kPlainFaster;
    drafted_ = draft;
  }

  std::vector<TreeBuilder> builders_;
  uint64_t seed_, draws_ = 0;
  bool drafted_ = true;
};

// The best rate of any fixed budget, off included.
inline double BestFixedRate(const Machine& machine, uint32_t batch, uint32_t* budget) {
  double best = 0.0;
  for (const uint32_t fixed : {0u, 1u, 2u, 3u, 4u, 6u, 8u, 12u, 16u, 24u, 32u, 48u, 64u}) {
    Simulation simulation(99);
    simulation.Run(machine, batch, 600, fixed);
    if (simulation.Rate() > best) best = simulation.Rate(), *budget = fixed;
  }
  return best;
}

}  // namespace kdt
