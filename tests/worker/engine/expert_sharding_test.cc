// Whole experts on their ranks: a row's result depends on nothing but the row, and what cannot be split is
// refused by name.
#include "common/model_config.h"
#include "tests/support/catch.h"
#include "tests/worker/support/engine_group.h"

namespace kdt::testing {

TEST_CASE("with whole experts a token is the same bits alone and beside others") {
  const int tp = GENERATE(1, 2, 8);
  CAPTURE(tp);
  EngineOptions options = GoldenOptions(false);
  options.moe_sharding = MoeSharding::kExpert;
  auto group = EngineGroup::Start(options, tp);
  REQUIRE(group.ok());
  const std::vector<int32_t> prompts[] = {{3, 1, 4, 1, 5, 9}, {2, 7, 1, 8}, {1, 6, 1, 8, 0, 3, 3}};
  const auto add = [&](v1::StepRequest* request, uint64_t id) {
    const std::vector<int32_t>& prompt = prompts[id - 1];
    v1::SamplingState sampling = GreedySampling(static_cast<uint32_t>(prompt.size()));
    sampling.set_logprobs(3);
    AddCreate(request, id, sampling);
    AddChunk(request, id, 0, prompt)->set_sample(true);
  };
  std::vector<v1::PositionLogprobs> alone;
  for (uint64_t id = 1; id <= 3; ++id) {
    v1::StepRequest request;
    add(&request, id);
    const auto response = (*group)->Step(request);
    REQUIRE(response.ok());
    alone.push_back(response->results(0).logprobs(0));
  }
  (*group)->Restart();
  v1::StepRequest request;
  for (uint64_t id = 1; id <= 3; ++id) add(&request, id);
  const auto together = (*group)->Step(request);
  REQUIRE(together.ok());
  for (int s = 0; s < 3; ++s) {
    CHECK(together->results(s).logprobs(0).SerializeAsString() == alone[s].SerializeAsString());
  }
}

TEST_CASE("whole experts need a number of experts that the ranks divide") {
  auto config = ModelConfig::Load(std::string(KDT_GOLDENS_DIR) + "/model");
  REQUIRE(config.ok());
  config->n_routed_experts = 12;
  CHECK(config->CheckTensorParallel(8).ok());
  const absl::Status status = config->CheckTensorParallel(8, true);
  CHECK(status.code() == absl::StatusCode::kInvalidArgument);
  CHECK(std::string(status.message()).find("n_routed_experts 12") != std::string::npos);
  // A narrow expert cannot be cut in slices of whole INT4 groups, but it can stay whole.
  config->n_routed_experts = 16;
  config->moe_intermediate_size = 128;
  CHECK(!config->CheckTensorParallel(8).ok());
  CHECK(config->CheckTensorParallel(8, true).ok());
}

}  // namespace kdt::testing
