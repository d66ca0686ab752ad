// An engine of random weights, from configs alone: what kdt-rank-bench measures.
#include <cmath>
#include <filesystem>

#include "tests/support/catch.h"
#include "tests/worker/support/engine_group.h"

namespace kdt::testing {

TEST_CASE("random weights give finite results behind an assumed context") {
  EngineOptions options = GoldenOptions(true);
  options.random_weights = true;
  options.kv_slots = 600;
  const int tp = GENERATE(1, 8);
  CAPTURE(tp);
  auto group = EngineGroup::Start(options, tp);
  REQUIRE(group.ok());
  for (int rank = 0; rank < tp; ++rank) {
    REQUIRE((*group)->engine(rank).AssumeSequence(7, 500).ok());
  }
  v1::StepRequest request;
  AddTree(&request, 7, 500, {5, 6, 7, 8}, {0, 0, 1})->set_draft_top_k(4);
  const auto response = (*group)->Step(request);
  REQUIRE(response.ok());
  REQUIRE(response->results_size() == 1);
  CHECK(response->results(0).error().empty());
  CHECK(response->results(0).tokens_size() >= 1);
  REQUIRE(response->results(0).draft().log_probs_size() > 0);
  for (const float log_prob : response->results(0).draft().log_probs()) CHECK(std::isfinite(log_prob));
}

TEST_CASE("an engine with a checkpoint assumes nothing") {
  auto group = EngineGroup::Start(GoldenOptions(false), 1);
  REQUIRE(group.ok());
  CHECK((*group)->engine(0).AssumeSequence(7, 5).code() == absl::StatusCode::kFailedPrecondition);
}

}  // namespace kdt::testing
