#include "coordinator/ddtree/budget_controller.h"

#include <cmath>
#include <numeric>

#include "tests/coordinator/ddtree/simulation.h"
#include "tests/support/catch.h"

namespace kdt {
namespace {

// A chain of nodes with these conditional probabilities.
Tree Chain(const std::vector<double>& probabilities) {
  Tree tree;
  double log_prob = 0.0;
  for (size_t i = 0; i <= probabilities.size(); ++i) {
    if (i > 0) log_prob += std::log(probabilities[i - 1]);
    tree.tokens.push_back(0);
    tree.parents.push_back(static_cast<int32_t>(i) - 1);
    tree.depths.push_back(static_cast<uint32_t>(i));
    tree.ranks.push_back(0);
    tree.log_probs.push_back(log_prob);
  }
  return tree;
}

TEST_CASE("acceptance ratios are learnt for each depth and never let a child gain more than its parent") {
  AcceptanceModel model;
  const Tree tree = Chain({0.8, 0.8, 0.8});
  std::vector<double> gains;
  model.Gains(tree, &gains);
  CHECK(gains[2] == Catch::Approx(0.512));
  // Depth 1 is accepted in 4 of 10 rounds although 0.8 was promised; once there, depth 2 always is.
  for (uint64_t round = 0; round < 2000; ++round) {
    const std::vector<uint32_t> accepted =
        round % 10 < 4 ? std::vector<uint32_t>{1, 2} : std::vector<uint32_t>{};
    model.Observe(tree, 2, accepted, round);
  }
  CHECK(model.Ratio(1) == Catch::Approx(0.5).epsilon(0.05));
  CHECK(model.Ratio(2) == Catch::Approx(1.25).epsilon(0.05));
  CHECK(model.Ratio(3) == 1.0);
  model.Gains(tree, &gains);
  CHECK(gains[0] == Catch::Approx(0.4).epsilon(0.05));
  CHECK(gains[1] <= gains[0]);
  CHECK(gains[2] <= gains[1]);

  // After a long pause a few rounds are enough to change the picture.
  for (uint64_t round = 0; round < 12; ++round)
    model.Observe(tree, 2, std::vector<uint32_t>{1, 2}, 10000 + round);
  CHECK(model.Ratio(1) > 0.9);
}

TEST_CASE("nodes go to the sequences that gain most; fixed budgets and limits hold") {
  const Tree good = Chain({0.9, 0.9, 0.9, 0.9}), poor = Chain({0.1, 0.1, 0.1, 0.1});
  BudgetController controller;
  // A machine on which a row costs little.
  for (int i = 0; i < 30; ++i) {
    for (uint32_t rows = 2; rows <= 10; ++rows) {
      controller.ObserveStep({.rows = rows, .context_tokens = 100, .batch = 2}, true, 1000.0 + 40.0 * rows,
                             50.0);
    }
  }
  const StepShape step{.context_tokens = 100, .batch = 2};
  std::vector<BudgetRequest> requests = {{&poor, std::nullopt}, {&good, std::nullopt}};
  const BudgetDecision decision = controller.Decide(requests, step, 1000);
  CHECK(decision.reason == BudgetReason::kBest);
  CHECK(decision.draft);
  CHECK(decision.nodes[1] == 4);
  CHECK(decision.nodes[0] < decision.nodes[1]);
  CHECK(decision.total_nodes == decision.nodes[0] + decision.nodes[1]);
  CHECK(decision.expected_tokens > 5.0);
  CHECK(decision.speculative_rate > decision.plain_rate);
  CHECK_THAT(decision.ToString(), Catch::Matchers::ContainsSubstring("(best)"));
  CHECK(controller.Decide(requests, step, 2).total_nodes == 2);
  CHECK(controller.Decide(requests, step, 0).total_nodes == 0);

  requests = {{&poor, 3}, {&good, 0}};
  const BudgetDecision fixed = controller.Decide(requests, step, 1000);
  CHECK(fixed.reason == BudgetReason::kFixed);
  CHECK(fixed.nodes == std::vector<uint32_t>{3, 0});
  requests = {{&poor, 99}, {&good, std::nullopt}};
  const BudgetDecision mixed = controller.Decide(requests, step, 6);
  CHECK(mixed.nodes == std::vector<uint32_t>{4, 2});

  requests = {{nullptr, std::nullopt}, {nullptr, 5}};
  const BudgetDecision nothing = controller.Decide(requests, step, 1000);
  CHECK(nothing.reason == BudgetReason::kNothingDrafted);
  CHECK(nothing.nodes == std::vector<uint32_t>{0, 0});
  CHECK(nothing.draft);
}

TEST_CASE("the first decision is small") {
  Simulation simulation(3);
  const Machine machine{[](uint32_t rows) { return 1000.0 * rows; }, 100.0, 10.0};
  simulation.Run(machine, 1, 1);
  CHECK(simulation.last.total_nodes <= 8);
  // And growth is gradual: never more than twice the rows seen so far.
  uint32_t most = 1 + simulation.last.total_nodes;
  for (int i = 0; i < 200; ++i) {
    simulation.Run(machine, 1, 1);
    CHECK(1 + simulation.last.total_nodes <= 2 * most + 1);
    most = std::max(most, 1 + simulation.last.total_nodes);
  }
}

struct Setting {
  const char* name;
  Machine machine;
};

// What the machines of the project are like, and some that are harder.
std::vector<Setting> Settings() {
  return {
      {"flat: a GPU with a dense model", {[](uint32_t r) { return 8000.0 + 10.0 * r; }, 800, 50}},
      {"mixture of experts",
       {[](uint32_t r) { return 6000.0 * (1.0 + 0.32 * std::pow(r - 1.0, 0.8)); }, 600, 50}},
      {"steep: a CPU that is busy with one row", {[](uint32_t r) { return 500.0 + 1500.0 * r; }, 300, 50}},
      {"mild", {[](uint32_t r) { return 3000.0 + 300.0 * r; }, 400, 50}},
      {"captured graphs: stairs", {[](uint32_t r) { return 3000.0 + 2000.0 * ((r + 7) / 8); }, 400, 50}},
      {"saturating experts",
       {[](uint32_t r) { return 3000.0 + 6000.0 * (1.0 - std::exp(-(r - 1.0) / 4.0)); }, 400, 50}},
      {"a useless drafter", {[](uint32_t r) { return 8000.0 + 10.0 * r; }, 800, 50, 0.05, 0.02}},
      {"an over-confident drafter",
       {[](uint32_t r) { return 6000.0 * (1.0 + 0.1 * std::pow(r - 1.0, 0.8)); }, 600, 50, 0.05, 0.5}},
      {"noise of 30%", {[](uint32_t r) { return 3000.0 + 300.0 * r; }, 400, 50, 0.3}},
  };
}

TEST_CASE("auto ends within 5% of the best fixed budget, off included") {
  for (const Setting& setting : Settings()) {
    for (const uint32_t batch : {1u, 8u}) {
      uint32_t budget = 0;
      const double best = BestFixedRate(setting.machine, batch, &budget);
      Simulation simulation(1);
      simulation.Run(setting.machine, batch, 800);
      const double learning = simulation.Rate();
      simulation.Reset();
      simulation.Run(setting.machine, batch, 1200);
      INFO(setting.name << ", batch " << batch << ", best fixed budget " << budget << ": "
                        << simulation.last.ToString());
      CHECK(simulation.Rate() > 0.95 * best);
      // Learning included it may not lag far behind either.
      CHECK(learning > 0.92 * best);
      CHECK(simulation.explorations + simulation.probes <= simulation.steps * 5 / 100);
      CHECK(simulation.switches <= 2);
    }
  }
}

TEST_CASE("a useless drafter is not paid for, and probing it costs at most 2% of the steps") {
  const Machine machine{[](uint32_t r) { return 5000.0 + 200.0 * r; }, 1000, 20, 0.05, 0.0};
  Simulation simulation(5);
  simulation.Run(machine, 4, 1000);
  CHECK_FALSE(simulation.controller.speculating());
  simulation.Reset();
  simulation.Run(machine, 4, 4000);
  CHECK(simulation.plain_steps + simulation.probes == simulation.steps);
  CHECK(simulation.probes > 0);
  CHECK(simulation.probes <= simulation.steps * 2 / 100);
}

TEST_CASE("speculation comes back when the drafter turns useful") {
  Machine machine{[](uint32_t r) { return 5000.0 + 100.0 * r; }, 800, 20, 0.05, 0.02};
  Simulation simulation(6);
  simulation.Run(machine, 2, 1500);
  REQUIRE_FALSE(simulation.controller.speculating());
  machine.truth = 1.0;
  simulation.Run(machine, 2, 3500);
  CHECK(simulation.controller.speculating());
  uint32_t budget = 0;
  const double best = BestFixedRate(machine, 2, &budget);
  simulation.Reset();
  simulation.Run(machine, 2, 1000);
  CHECK(simulation.Rate() > 0.95 * best);
}

TEST_CASE("a sudden change of cost is followed") {
  const Machine cheap{[](uint32_t r) { return 8000.0 + 10.0 * r; }, 500, 50};
  const Machine dear{[](uint32_t r) { return 1000.0 + 3000.0 * r; }, 500, 50};
  for (const bool cheap_first : {true, false}) {
    const Machine &before = cheap_first ? cheap : dear, &after = cheap_first ? dear : cheap;
    uint32_t budget = 0;
    const double best = BestFixedRate(after, 1, &budget);
    Simulation simulation(7);
    simulation.Run(before, 1, 1500);
    simulation.Run(after, 1, 1500);
    simulation.Reset();
    simulation.Run(after, 1, 1500);
    INFO("cheap first: " << cheap_first << ", best " << budget << ": " << simulation.last.ToString());
    CHECK(simulation.Rate() > 0.95 * best);
  }
}

TEST_CASE("the budget of a sequence shrinks with load and grows back") {
  const Machine machine{[](uint32_t r) { return 4000.0 + (r <= 16 ? 40.0 * r : 640.0 + 600.0 * (r - 16)); },
                        300, 30};
  Simulation simulation(8);
  std::vector<double> each;
  for (const uint32_t batch : {1u, 16u, 1u}) {
    simulation.Run(machine, batch, 600);
    uint32_t budget = 0;
    const double best = BestFixedRate(machine, batch, &budget);
    simulation.Reset();
    double nodes = 0.0;
    for (int i = 0; i < 600; ++i) {
      simulation.Run(machine, batch, 1);
      nodes += simulation.last.total_nodes;
    }
    each.push_back(nodes / 600.0 / batch);
    INFO("batch " << batch << ", best " << budget << ": " << simulation.last.ToString());
    CHECK(simulation.Rate() > 0.95 * best);
  }
  CHECK(each[1] < 0.25 * each[0]);
  CHECK(each[2] > 0.8 * each[0]);
}

TEST_CASE("decisions are a function of what was observed") {
  const Machine machine{[](uint32_t r) { return 3000.0 + 300.0 * r; }, 400, 50, 0.3};
  Simulation a(9), b(9);
  a.Run(machine, 3, 500);
  b.Run(machine, 3, 500);
  CHECK(a.last.nodes == b.last.nodes);
  CHECK(a.last.ToString() == b.last.ToString());
  CHECK(a.tokens == b.tokens);
  CHECK(a.micros == b.micros);
}

}  // namespace
}  // namespace kdt
