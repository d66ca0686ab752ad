// The public API over a real cluster: golden tokens at every tp, batching and chunking that change nothing,
// stop rules.
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/support/catch.h"
#include "tests/support/cluster.h"
#include "tests/support/requests.h"

namespace kdt::testing {
namespace {

nlohmann::json GoldenPrompts() {
  std::ifstream file(std::string(KDT_GOLDENS_DIR) + "/target.json");
  return nlohmann::json::parse(file)["prompts"];
}

void CheckGoldens(v1::Generation::Stub& stub) {
  for (const auto& golden : GoldenPrompts()) {
    const auto greedy = golden["greedy"].get<std::vector<uint32_t>>();
    v1::GenerateRequest request =
        GreedyRequest(golden["tokens"].get<std::vector<uint32_t>>(), static_cast<uint32_t>(greedy.size()));
    request.mutable_output()->set_prompt_logprobs(1);
    request.mutable_output()->set_logprobs(1);
    std::vector<Sample> samples;
    const grpc::Status status = Generate(stub, request, &samples);
    INFO(status.error_message());
    REQUIRE(status.ok());
    CHECK(samples[0].tokens == greedy);
    REQUIRE(samples[0].logprobs.size() == greedy.size());
    REQUIRE(samples[0].complete.has_value());
    CHECK(samples[0].complete->finish_reason() == v1::LENGTH);
    CHECK(samples[0].complete->usage().completion_tokens() == greedy.size());
    const auto& expected = golden["token_logprobs"];  // the first is null: nothing predicts the first token
    REQUIRE(samples[0].complete->prompt_logprobs_size() == static_cast<int>(expected.size()) - 1);
    for (size_t i = 1; i < expected.size(); ++i) {
      const float got = samples[0].complete->prompt_logprobs(static_cast<int>(i) - 1).token().logprob();
      CHECK(std::abs(got - expected[i].get<float>()) < 1e-3);
    }
  }
}

// Tokens and the exact bits of their log-probabilities.
bool SameBits(const Sample& a, const Sample& b) {
  if (a.tokens != b.tokens || a.logprobs.size() != b.logprobs.size()) return false;
  for (size_t i = 0; i < a.logprobs.size(); ++i) {
    if (a.logprobs[i].SerializeAsString() != b.logprobs[i].SerializeAsString()) return false;
  }
  return true;
}

}  // namespace

TEST_CASE("golden tokens and log-probabilities come out at every tensor-parallel size") {
  for (const int tp : {1, 2, 4, 8}) {
    DYNAMIC_SECTION("tp " << tp) {
      Cluster cluster({GoldenModel(), "", tp, {}});
      CheckGoldens(cluster.stub());
    }
  }
}

TEST_CASE("a request gives the same bits alone, beside others, and in small or large chunks") {
  const auto prompts = GoldenPrompts();
  v1::GenerateRequest request = GreedyRequest(prompts[2]["tokens"].get<std::vector<uint32_t>>(), 24);
  request.mutable_output()->set_logprobs(5);
  request.mutable_sampling()->set_temperature(0.9F);
  request.mutable_sampling()->set_seed(7);

  std::vector<Sample> reference;
  for (const char* chunk : {"--prefill_chunk=512", "--prefill_chunk=16"}) {
    Cluster cluster({GoldenModel(), "", 2, {chunk}});
    std::vector<Sample> alone;
    REQUIRE(Generate(cluster.stub(), request, &alone).ok());
    REQUIRE(alone[0].tokens.size() == 24);
    REQUIRE(alone[0].logprobs.size() == 24);
    if (reference.empty()) reference = alone;
    CHECK(SameBits(reference[0], alone[0]));

    // Seven others with prompts and lengths of their own, started together with it.
    std::vector<std::thread> others;
    for (uint32_t i = 0; i < 7; ++i) {
      others.emplace_back([&cluster, &prompts, i] {
        auto tokens = prompts[i % 3]["tokens"].get<std::vector<uint32_t>>();
        tokens.push_back(i);
        std::vector<Sample> ignored;
        Generate(cluster.stub(), GreedyRequest(tokens, 20 + 5 * i), &ignored);
      });
    }
    std::vector<Sample> beside;
    const grpc::Status status = Generate(cluster.stub(), request, &beside);
    for (std::thread& other : others) other.join();
    REQUIRE(status.ok());
    CHECK(SameBits(reference[0], beside[0]));
  }
}

TEST_CASE("stop rules, samples and seeds") {
  Cluster cluster({GoldenModel(), "", 2, {}});
  const auto golden = GoldenPrompts()[0];
  const auto tokens = golden["tokens"].get<std::vector<uint32_t>>();
  const auto greedy = golden["greedy"].get<std::vector<uint32_t>>();

  SECTION("a stop token ends the text and is named") {
    v1::GenerateRequest request = GreedyRequest(tokens, 40);
    request.mutable_stop()->add_stop_token_ids(greedy[5]);
    std::vector<Sample> samples;
    REQUIRE(Generate(cluster.stub(), request, &samples).ok());
    CHECK(samples[0].complete->finish_reason() == v1::STOP);
    CHECK(samples[0].complete->stop_token_id() == greedy[5]);
    CHECK(samples[0].tokens.size() == 6);
  }
  SECTION("min_tokens keeps a stop token from being drawn") {
    v1::GenerateRequest request = GreedyRequest(tokens, 12);
    request.mutable_stop()->add_stop_token_ids(greedy[0]);
    request.mutable_stop()->set_min_tokens(10);
    std::vector<Sample> samples;
    REQUIRE(Generate(cluster.stub(), request, &samples).ok());
    REQUIRE(samples[0].tokens.size() >= 10);
    for (size_t i = 0; i < 10; ++i) CHECK(samples[0].tokens[i] != greedy[0]);
  }
  SECTION("n samples differ by seed + index") {
    v1::GenerateRequest request = GreedyRequest(tokens, 10);
    request.mutable_sampling()->set_temperature(1);
    request.mutable_sampling()->set_seed(40);
    request.mutable_sampling()->set_n(3);
    std::vector<Sample> together;
    REQUIRE(Generate(cluster.stub(), request, &together).ok());
    REQUIRE(together.size() == 3);
    request.mutable_sampling()->clear_n();
    for (uint64_t i = 0; i < 3; ++i) {
      request.mutable_sampling()->set_seed(40 + i);
      std::vector<Sample> alone;
      REQUIRE(Generate(cluster.stub(), request, &alone).ok());
      CHECK(alone[0].tokens == together[i].tokens);
    }
    CHECK(together[0].tokens != together[1].tokens);
  }
  SECTION("a seed that was drawn is reported and gives the same tokens again") {
    v1::GenerateRequest request = GreedyRequest(tokens, 10);
    request.mutable_sampling()->set_temperature(1);
    std::vector<Sample> first, again;
    REQUIRE(Generate(cluster.stub(), request, &first).ok());
    request.mutable_sampling()->set_seed(first[0].complete->seed());
    REQUIRE(Generate(cluster.stub(), request, &again).ok());
    CHECK(first[0].tokens == again[0].tokens);
  }
  SECTION("a repeated prompt is served from the cache with the same tokens") {
    v1::GenerateRequest request = GreedyRequest(GoldenPrompts()[2]["tokens"].get<std::vector<uint32_t>>(), 8);
    std::vector<Sample> first, again;
    REQUIRE(Generate(cluster.stub(), request, &first).ok());
    REQUIRE(Generate(cluster.stub(), request, &again).ok());
    CHECK(first[0].tokens == again[0].tokens);
    CHECK(first[0].complete->usage().cached_prompt_tokens() == 0);
    CHECK(again[0].complete->usage().cached_prompt_tokens() > 0);
  }
}

}  // namespace kdt::testing
