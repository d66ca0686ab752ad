// The drafter's options: context window and rope factor.
#include <numeric>

#include "tests/support/catch.h"
#include "tests/worker/support/engine_group.h"

namespace kdt::testing {
namespace {

// Draft behind the prompt 0, 7, 14, ... of `length` tokens.
std::string Draft(EngineOptions options, int length) {
  auto group = EngineGroup::Start(options, 1);
  REQUIRE(group.ok());
  std::vector<int32_t> prompt(length);
  for (int i = 0; i < length; ++i) prompt[i] = i * 7;
  v1::StepRequest request;
  AddCreate(&request, 1, GreedySampling(length));
  v1::PrefillChunk* chunk = AddChunk(&request, 1, 0, prompt);
  chunk->set_sample(true);
  chunk->set_draft_top_k(8);
  const auto response = (*group)->Step(request);
  REQUIRE(response.ok());
  REQUIRE(response->results(0).draft().k() == 8);
  return response->results(0).draft().SerializeAsString();
}

}  // namespace

TEST_CASE("a window as long as the context changes nothing, a shorter one does") {
  EngineOptions options = GoldenOptions(true);
  const std::string whole = Draft(options, 30);
  options.draft_window = 30;
  CHECK(Draft(options, 30) == whole);
  options.draft_window = 29;
  CHECK(Draft(options, 30) != whole);
}

TEST_CASE("the rope factor is the config's unless another is given") {
  EngineOptions options = GoldenOptions(true);
  const std::string by_config = Draft(options, 30);
  options.draft_rope_factor = 1;  // what mscale / mscale_all_dim says
  CHECK(Draft(options, 30) == by_config);
  options.draft_rope_factor = 1.416f;
  CHECK(Draft(options, 30) != by_config);
  options.draft_rope_factor = -1;
  auto refused = EngineGroup::Start(options, 1);
  REQUIRE(!refused.ok());
  CHECK(std::string(refused.status().message()).find("draft_rope_factor") != std::string::npos);
}

}  // namespace kdt::testing
