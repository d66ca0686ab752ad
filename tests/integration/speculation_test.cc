// Speculation never changes the output: tokens and log-probabilities are the same bits with speculation off,
// as a chain, and with any tree, for every sampling setting, alone and in a batch.
#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "tests/support/catch.h"
#include "tests/support/chi_square.h"
#include "tests/support/cluster.h"

namespace kdt::testing {
namespace {

constexpr size_t kPrompts = 100;
constexpr uint32_t kTokens = 16;
constexpr size_t kBatch = 8;

std::vector<std::string> HeldOutPrompts() {
  std::ifstream file(std::string(KDT_SOURCE_DIR) + "/tests/bench/prompts/heldout.json");
  std::vector<std::string> prompts;
  const nlohmann::json parsed = nlohmann::json::parse(file);
  for (const auto& entry : parsed["prompts"]) prompts.push_back(entry["text"].get<std::string>());
  return prompts;
}

struct Speculation {
  const char* name;
  v1::SpeculationParams::Mode mode;
  int budget;  // -1: auto
};

constexpr Speculation kOff{"off", v1::SpeculationParams::OFF, -1};
constexpr Speculation kSettings[] = {
    {"chain", v1::SpeculationParams::CHAIN, -1},  {"tree 1", v1::SpeculationParams::TREE, 1},
    {"tree 4", v1::SpeculationParams::TREE, 4},   {"tree 7", v1::SpeculationParams::TREE, 7},
    {"tree 16", v1::SpeculationParams::TREE, 16}, {"tree 32", v1::SpeculationParams::TREE, 32},
    {"tree 64", v1::SpeculationParams::TREE, 64}, {"tree 128", v1::SpeculationParams::TREE, 128},
    {"auto", v1::SpeculationParams::DEFAULT, -1},
};

// A request whose sampling is drawn from `random`: temperature 0, 0.7 or 1.3, and each filter and penalty on
// or off.
v1::GenerateRequest DrawRequest(const std::string& prompt, std::mt19937_64& random) {
  const auto coin = [&random] { return random() % 2 == 0; };
  v1::GenerateRequest request;
  request.set_text(prompt);
  v1::SamplingParams* sampling = request.mutable_sampling();
  constexpr float kTemperatures[] = {0.0F, 0.7F, 1.3F};
  sampling->set_temperature(kTemperatures[random() % 3]);
  sampling->set_seed(random());
  sampling->set_top_p(coin() ? 0.9F : 1.0F);
  sampling->set_top_k(coin() ? 40 : 0);
  sampling->set_min_p(coin() ? 0.02F : 0.0F);
  sampling->set_repetition_penalty(coin() ? 1.2F : 1.0F);
  sampling->set_frequency_penalty(coin() ? 0.3F : 0.0F);
  sampling->set_presence_penalty(coin() ? 0.2F : 0.0F);
  if (coin()) {
    for (int i = 0; i < 5; ++i) {
      (*sampling->mutable_logit_bias())[static_cast<uint32_t>(random() % 3000)] = i % 2 == 0 ? 2.0F : -3.0F;
    }
  }
  request.mutable_stop()->set_max_tokens(kTokens);
  if (coin()) request.mutable_stop()->set_min_tokens(6);
  request.mutable_output()->set_logprobs(3);
  return request;
}

void Apply(const Speculation& speculation, v1::GenerateRequest* request) {
  request->mutable_speculation()->set_mode(speculation.mode);
  request->mutable_speculation()->clear_budget();
  if (speculation.budget >= 0)
    request->mutable_speculation()->set_budget(static_cast<uint32_t>(speculation.budget));
}

// Everything the client may rely on, as bytes.
std::string Bits(const Sample& sample) {
  std::string bits = sample.text;
  for (const uint32_t id : sample.tokens) {
    bits += ',';
    bits += std::to_string(id);
  }
  for (const auto& position : sample.logprobs) bits += position.SerializeAsString();
  bits += std::to_string(sample.complete->finish_reason());
  return bits;
}

Sample Run(Cluster& cluster, const v1::GenerateRequest& request) {
  std::vector<Sample> samples;
  const grpc::Status status = Generate(cluster.stub(), request, &samples);
  INFO(status.error_message());
  REQUIRE(status.ok());
  REQUIRE(samples[0].complete.has_value());
  return samples[0];
}

std::vector<std::string> RunTogether(Cluster& cluster, const std::vector<v1::GenerateRequest>& requests) {
  std::vector<std::string> bits(requests.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < requests.size(); ++i) {
    threads.emplace_back([&, i] {
      std::vector<Sample> samples;
      const grpc::Status status = Generate(cluster.stub(), requests[i], &samples);
      bits[i] = status.ok() ? Bits(samples[0]) : status.error_message();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return bits;
}

void CheckBitEquality(int tp, const char* tree, size_t prompts, uint64_t seed) {
  Cluster cluster({ShippedModel(), ShippedDrafter(), tp, {std::string("--tree=") + tree}});
  const std::vector<std::string> texts = HeldOutPrompts();
  REQUIRE(texts.size() >= prompts);
  std::mt19937_64 random(seed);
  uint64_t accepted = 0;
  std::vector<v1::GenerateRequest> requests;
  std::vector<std::string> expected;
  for (size_t i = 0; i < prompts; ++i) {
    requests.push_back(DrawRequest(texts[i], random));
    Apply(kOff, &requests.back());
    const Sample off = Run(cluster, requests.back());
    CHECK(off.complete->speculation().drafted_nodes() == 0);
    expected.push_back(Bits(off));
  }
  for (const Speculation& setting : kSettings) {
    for (size_t i = 0; i < prompts; ++i) {
      Apply(setting, &requests[i]);
      const Sample sample = Run(cluster, requests[i]);
      INFO(setting.name << ", prompt " << i << ", tp " << tp << "\n" << requests[i].ShortDebugString());
      REQUIRE(Bits(sample) == expected[i]);
      accepted += sample.complete->speculation().accepted_tokens();
    }
  }
  CHECK(accepted > prompts);  // or nothing was tested

  // In batches of eight, each request with a speculation of its own.
  for (size_t begin = 0; begin + kBatch <= prompts; begin += kBatch) {
    std::vector<v1::GenerateRequest> batch(requests.begin() + static_cast<std::ptrdiff_t>(begin),
                                           requests.begin() + static_cast<std::ptrdiff_t>(begin + kBatch));
    for (v1::GenerateRequest& request : batch) Apply(kSettings[random() % std::size(kSettings)], &request);
    const std::vector<std::string> bits = RunTogether(cluster, batch);
    for (size_t i = 0; i < kBatch; ++i) {
      INFO("batch at " << begin << ", request " << i);
      REQUIRE(bits[i] == expected[begin + i]);
    }
  }
}

}  // namespace

TEST_CASE("tp 1: the same bits with every speculation setting") {
  CheckBitEquality(1, "best-first", kPrompts, 11);
}

TEST_CASE("tp 1, spine-first trees: the same bits") { CheckBitEquality(1, "spine-first", 24, 12); }

TEST_CASE("tp 8: the same bits with every speculation setting") { CheckBitEquality(8, "best-first", 24, 13); }

// The same at full length, minutes long: run it by its tag, test_speculation "[full]".
TEST_CASE("tp 8, all prompts: the same bits with every speculation setting", "[.][full]") {
  CheckBitEquality(8, "best-first", kPrompts, 14);
}

TEST_CASE("at temperature 1 tokens drawn through trees follow the target's distribution") {
  // 5,000 samples of five tokens with fresh seeds. The draws are pooled by their prefix; for each prefix seen
  // often enough the counts are compared with the target's own probabilities (chi-square at level 1e-4 for
  // each prefix, so that a correct build fails less than once in 200 runs).
  constexpr uint32_t kSamples = 5000;
  constexpr uint32_t kPerRequest = 20;
  constexpr uint32_t kLength = 5;
  constexpr double kLevel = 1e-4;
  Cluster cluster({ShippedModel(), ShippedDrafter(), 1, {}});
  v1::GenerateRequest request;
  request.set_text("import os\nimport ");
  request.mutable_sampling()->set_temperature(1);
  request.mutable_sampling()->set_top_p(1);
  request.mutable_sampling()->set_top_k(0);
  request.mutable_sampling()->set_n(kPerRequest);
  request.mutable_stop()->set_max_tokens(kLength);
  request.mutable_stop()->set_ignore_eos(true);
  Apply({"tree 16", v1::SpeculationParams::TREE, 16}, &request);

  std::map<std::vector<uint32_t>, std::map<uint32_t, uint64_t>> counts;  // prefix -> next token -> times
  std::mt19937_64 random(std::random_device{}());
  uint64_t drawn = 0, accepted = 0;
  for (uint32_t done = 0; done < kSamples; done += kPerRequest) {
    request.mutable_sampling()->set_seed(random());
    std::vector<Sample> samples;
    REQUIRE(Generate(cluster.stub(), request, &samples).ok());
    for (const Sample& sample : samples) {
      REQUIRE(sample.tokens.size() == kLength);
      accepted += sample.complete->speculation().accepted_tokens();
      for (size_t i = 0; i < kLength; ++i) {
        ++counts[{sample.tokens.begin(), sample.tokens.begin() + static_cast<std::ptrdiff_t>(i)}]
                [sample.tokens[i]];
        ++drawn;
      }
    }
  }
  CHECK(drawn >= 20000);
  CHECK(accepted > kSamples / 4);

  v1::TokenizeRequest tokenize;
  tokenize.set_text(request.text());
  v1::TokenizeResponse prompt;
  grpc::ClientContext context;
  REQUIRE(cluster.stub().Tokenize(&context, tokenize, &prompt).ok());
  int tested = 0;
  for (const auto& [prefix, next] : counts) {
    uint64_t total = 0;
    for (const auto& [token, count] : next) total += count;
    if (total < 400 || tested == 40) continue;
    ++tested;
    v1::GenerateRequest probe;
    *probe.mutable_token_ids()->mutable_ids() = prompt.ids();
    for (const uint32_t id : prefix) probe.mutable_token_ids()->add_ids(id);
    probe.mutable_stop()->set_max_tokens(1);
    probe.mutable_stop()->set_ignore_eos(true);
    probe.mutable_output()->set_logprobs(20);
    const Sample target = Run(cluster, probe);
    // Tokens expected at least five times get a cell each, all others share one.
    std::vector<double> expected;
    std::vector<double> observed;
    double expected_rest = static_cast<double>(total), observed_rest = static_cast<double>(total);
    for (const v1::TokenLogprob& top : target.logprobs[0].top()) {
      const double mean = static_cast<double>(total) * std::exp(static_cast<double>(top.logprob()));
      if (mean < 5) continue;
      const auto seen = next.find(top.token_id());
      const double count = seen == next.end() ? 0 : static_cast<double>(seen->second);
      expected.push_back(mean);
      observed.push_back(count);
      expected_rest -= mean;
      observed_rest -= count;
    }
    if (expected_rest >= 5) {
      expected.push_back(expected_rest);
      observed.push_back(observed_rest);
    }
    if (expected.size() < 2) continue;
    INFO("prefix of " << prefix.size() << " tokens, " << total << " draws, " << expected.size() << " cells");
    CHECK(ChiSquarePValue(observed, expected) > kLevel);
  }
  CHECK(tested >= 3);
}

}  // namespace kdt::testing
