// Tree construction and ancestor rows at block size 16, k 64. Targets at budget 64, on one core: 20 us and 2
// us.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>

#include "common/rng.h"
#include "common/status.h"
#include "coordinator/ddtree/budget_controller.h"
#include "coordinator/ddtree/ddtree.h"

namespace kdt {
namespace {

constexpr size_t kDepth = 15;
constexpr size_t kTopK = 64;

struct Guesses {
  std::vector<uint32_t> tokens;
  std::vector<float> log_probs;
  DraftGuesses view() const { return {kDepth, kTopK, tokens, log_probs}; }
};

// Softmax over random scores, sharper (harder: deeper trees) or flatter (wider trees) by `scale`.
Guesses MakeGuesses(float scale) {
  Guesses guesses;
  for (uint32_t i = 0; i < kDepth; ++i) {
    std::vector<float> row;
    double total = 0.0;
    for (uint32_t j = 0; j < kTopK; ++j) {
      row.push_back(scale * GumbelNoise(1, i, j));
      total += std::exp(row.back());
      guesses.tokens.push_back(j);
    }
    std::sort(row.rbegin(), row.rend());
    for (const float score : row) guesses.log_probs.push_back(score - static_cast<float>(std::log(total)));
  }
  return guesses;
}

void BuildTree(benchmark::State& state) {
  const Guesses guesses = MakeGuesses(static_cast<float>(state.range(1)));
  TreeBuilder builder;
  for (auto _ : state) {
    auto tree = builder.Build(TreePolicy::kBestFirst, 0, guesses.view(), static_cast<size_t>(state.range(0)));
    KDT_CHECK(tree.ok());
    benchmark::DoNotOptimize((*tree)->tokens.data());
  }
}
BENCHMARK(BuildTree)
    ->ArgNames({"budget", "scale"})
    ->ArgsProduct({{16, 64, 255}, {1, 4}})
    ->Unit(benchmark::kMicrosecond);

void BuildAncestorRows(benchmark::State& state) {
  const Guesses guesses = MakeGuesses(1.0f);
  TreeBuilder builder;
  const auto tree =
      builder.Build(TreePolicy::kBestFirst, 0, guesses.view(), static_cast<size_t>(state.range(0)));
  KDT_CHECK(tree.ok());
  std::vector<uint64_t> rows;
  for (auto _ : state) {
    AncestorRows((*tree)->parents, &rows);
    benchmark::DoNotOptimize(rows.data());
    benchmark::ClobberMemory();
  }
}
BENCHMARK(BuildAncestorRows)->ArgName("budget")->Arg(16)->Arg(64)->Arg(255)->Unit(benchmark::kMicrosecond);

// One auto decision over `batch` sequences, each with a tree of 64 nodes, with a model that has seen steps.
void DecideBudget(benchmark::State& state) {
  const size_t batch = static_cast<size_t>(state.range(0));
  const Guesses guesses = MakeGuesses(2.0f);
  std::vector<TreeBuilder> builders(batch);
  std::vector<BudgetRequest> requests;
  for (TreeBuilder& builder : builders) {
    requests.push_back({*builder.Build(TreePolicy::kBestFirst, 0, guesses.view(), 64), std::nullopt});
  }
  BudgetController controller;
  StepShape step{.context_tokens = 1000, .batch = static_cast<uint32_t>(batch)};
  for (step.rows = step.batch; step.rows < 600; step.rows += step.rows / 8 + 1) {
    for (int i = 0; i < 4; ++i) controller.ObserveStep(step, true, 8000.0 + 10.0 * step.rows, 500.0);
  }
  for (auto _ : state) {
    BudgetDecision decision = controller.Decide(requests, step, 512);
    benchmark::DoNotOptimize(decision.total_nodes);
  }
}
BENCHMARK(DecideBudget)->ArgName("batch")->Arg(1)->Arg(8)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace kdt

BENCHMARK_MAIN();
