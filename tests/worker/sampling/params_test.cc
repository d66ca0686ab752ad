#include "kdt/v1/worker.pb.h"
#include "tests/support/catch.h"
#include "worker/sampling/sampling_params.h"

namespace kdt {
namespace {

v1::SamplingState Valid() {
  v1::SamplingState state;
  state.set_temperature(0.7f);
  state.set_top_p(0.9f);
  state.set_repetition_penalty(1.1f);
  return state;
}

}  // namespace

TEST_CASE("parameters are taken over as they are") {
  v1::SamplingState state = Valid();
  state.set_top_k(12);
  state.set_seed(~uint64_t{0});
  (*state.mutable_logit_bias())[90] = -3;
  (*state.mutable_logit_bias())[7] = 2;
  state.add_stop_token_ids(99);
  const auto params = ParseSamplingState(state, 100, 20);
  REQUIRE(params.ok());
  CHECK(params->temperature == 0.7f);
  CHECK(params->top_k == 12);
  CHECK(params->seed == ~uint64_t{0});
  CHECK(params->logit_bias == std::vector<std::pair<int32_t, float>>{{7, 2}, {90, -3}});
  CHECK(params->stop_token_ids == std::vector<int32_t>{99});
  CHECK(params->Truncates());
  CHECK(params->Penalizes());
}

TEST_CASE("limits of parameters") {
  v1::SamplingState state = Valid();
  SECTION("top_k over the vocabulary is the vocabulary") {
    state.set_top_k(0xffffffffu);
    CHECK(ParseSamplingState(state, 100, 20)->top_k == 100);
  }
  SECTION("a temperature too small to divide by is greedy") {
    state.set_temperature(1e-30f);
    const auto params = ParseSamplingState(state, 100, 20);
    REQUIRE(params.ok());
    CHECK(params->Greedy());
    CHECK(!params->Truncates());
  }
  SECTION("an id at the vocabulary's end") {
    state.add_stop_token_ids(100);
    CHECK(!ParseSamplingState(state, 100, 20).ok());
  }
  SECTION("logprobs over the limit") {
    state.set_logprobs(21);
    CHECK(!ParseSamplingState(state, 100, 20).ok());
  }
}

}  // namespace kdt
