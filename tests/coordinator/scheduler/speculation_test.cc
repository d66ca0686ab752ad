// Speculation changes speed, never the answer.
#include "tests/coordinator/scheduler/fixture.h"

namespace kdt::testing {
namespace {

struct Setting {
  SpeculationMode mode;
  std::optional<uint32_t> budget;
};

}  // namespace

TEST_CASE("any mode and budget gives the same tokens and log-probabilities, sooner") {
  ToyOptions toy;
  toy.block_size = 8;
  const Setting settings[] = {{SpeculationMode::kOff, {}},     {SpeculationMode::kChain, {}},
                              {SpeculationMode::kChain, 3},    {SpeculationMode::kTree, 1},
                              {SpeculationMode::kTree, 16},    {SpeculationMode::kTree, 64},
                              {SpeculationMode::kDefault, {}}, {SpeculationMode::kDefault, 0}};
  for (const TreePolicy policy : {TreePolicy::kBestFirst, TreePolicy::kSpineFirst, TreePolicy::kChain}) {
    SchedulerOptions options;
    options.speculation.policy = policy;
    Harness harness(toy, options);
    harness.group.Form();
    std::vector<RequestSpec> specs;
    std::vector<std::shared_ptr<Collector>> clients;
    for (const Setting& setting : settings) {
      specs.push_back(Spec(Prompt(30), 60));
      specs.back().mode = setting.mode;
      specs.back().budget = setting.budget;
      specs.back().sampling.set_logprobs(1);
      specs.back().sampling.set_temperature(1);
      clients.push_back(harness.Submit(specs.back()));
    }
    harness.scheduler->Start();
    const auto expected = harness.Expected(specs[0], 60);
    for (size_t i = 0; i < clients.size(); ++i) {
      REQUIRE(clients[i]->Wait().ok());
      const auto sample = clients[i]->sample();
      CHECK(sample.tokens == expected);
      REQUIRE(sample.logprobs.size() == 60);
      for (size_t t = 0; t < 60; ++t) CHECK(sample.logprobs[t].token().token_id() == expected[t]);
      const v1::SpeculationStats& stats = sample.complete->speculation();
      uint32_t by_depth = 0;
      for (const uint32_t count : stats.accepted_per_depth()) by_depth += count;
      CHECK(by_depth == stats.accepted_tokens());
      // The first token comes from the prefill; each round gives its accepted tokens and one of the target's
      // own.
      CHECK(1 + stats.rounds() + stats.accepted_tokens() >= 60);
      const bool off =
          settings[i].mode == SpeculationMode::kOff || settings[i].budget == std::optional<uint32_t>(0);
      if (off) {
        CHECK(stats.drafted_nodes() == 0);
        CHECK(stats.rounds() == 59);
      } else if (settings[i].budget.value_or(0) >= 16) {
        CHECK(stats.rounds() < 40);
        CHECK(stats.drafted_nodes() > 0);
      }
    }
    CHECK(harness.group.step_error().empty());
  }
}

TEST_CASE("stops inside an accepted path cut what is behind them") {
  ToyOptions toy;
  toy.block_size = 8;
  toy.max_draft_top_k = 16;
  SchedulerOptions options;
  options.speculation.budget = 64;
  for (uint32_t at = 3; at < 12; ++at) {
    Harness harness(toy, options);
    harness.Start();
    RequestSpec spec = Spec(Prompt(30), 40);
    const auto answer = harness.Expected(spec, 40);
    SECTION("stop token " + std::to_string(at)) {
      spec.sampling.add_stop_token_ids(answer[at]);
      const auto client = harness.Submit(spec);
      REQUIRE(client->Wait().ok());
      CHECK(client->sample().tokens.size() == at + 1);
      CHECK(client->sample().complete->stop_token_id() == answer[at]);
    }
    SECTION("max_tokens " + std::to_string(at)) {
      spec.max_tokens = at;
      const auto client = harness.Submit(spec);
      REQUIRE(client->Wait().ok());
      CHECK(client->sample().tokens == std::vector<uint32_t>(answer.begin(), answer.begin() + at));
    }
    SECTION("stop string " + std::to_string(at)) {
      const std::vector<std::string> strings = {
          *GoldenTokenizer()->Decode(std::span(answer).subspan(at, 1), false)};
      spec.stops = *StopStrings::Create(strings);
      const auto client = harness.Submit(spec);
      REQUIRE(client->Wait().ok());
      const auto tokens = client->sample().tokens;
      REQUIRE(tokens.size() <= at + 1);
      CHECK(tokens ==
            std::vector<uint32_t>(answer.begin(), answer.begin() + static_cast<long>(tokens.size())));
    }
    CHECK(harness.group.step_error().empty());
  }
}

TEST_CASE("a context that ends inside a tree is not passed") {
  ToyOptions toy;
  toy.block_size = 8;
  toy.max_context = 64;
  SchedulerOptions options;
  options.speculation.budget = 64;
  Harness harness(toy, options);
  harness.Start();
  const RequestSpec spec = Spec(Prompt(30), 34);
  const auto client = harness.Submit(spec);
  REQUIRE(client->Wait().ok());
  CHECK(client->sample().tokens == harness.Expected(spec, 34));
  CHECK(harness.group.step_error().empty());
}

}  // namespace kdt::testing
