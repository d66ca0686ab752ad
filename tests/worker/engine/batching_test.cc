// A row depends on its own sequence only: chunk sizes, company in the step and shared prefixes change no bit.
#include <cmath>
#include <random>

#include "tests/support/catch.h"
#include "tests/worker/support/engine_group.h"

namespace kdt::testing {
namespace {

constexpr int32_t kVocab = 1024;
constexpr int kTokens = 8;

std::vector<int32_t> RandomTokens(std::mt19937& random, size_t count) {
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % kVocab);
  return tokens;
}

v1::SamplingState Sampling(uint32_t prompt_length, uint64_t seed) {
  v1::SamplingState sampling = GreedySampling(prompt_length);
  sampling.set_temperature(0.8f);
  sampling.set_seed(seed);
  sampling.set_logprobs(2);
  return sampling;
}

// Everything a client can see of one sequence, as bytes.
struct Seen {
  std::string prompt;
  std::string generated;
  int32_t last = 0;
  void TakePrompt(const v1::SequenceResult& result) {
    for (const auto& logprobs : result.prompt_logprobs()) prompt += logprobs.SerializeAsString();
  }
  void Take(const v1::SequenceResult& result) {
    REQUIRE(result.error().empty());
    REQUIRE(result.tokens_size() == 1);
    generated += result.logprobs(0).SerializeAsString() + result.draft().SerializeAsString();
    last = static_cast<int32_t>(result.tokens(0));
  }
};

// One request alone, its prompt cut into chunks.
Seen RunAlone(EngineGroup& group, const std::vector<int32_t>& prompt, uint64_t seed, size_t chunk) {
  group.Restart();
  Seen seen;
  const auto length = static_cast<uint32_t>(prompt.size());
  for (size_t start = 0; start < prompt.size(); start += chunk) {
    v1::StepRequest request;
    if (start == 0) AddCreate(&request, 1, Sampling(length, seed));
    const size_t end = std::min(prompt.size(), start + chunk);
    v1::PrefillChunk* part =
        AddChunk(&request, 1, static_cast<uint32_t>(start), {prompt.begin() + start, prompt.begin() + end});
    part->set_prompt_logprobs(2);
    part->set_sample(end == prompt.size());
    if (end == prompt.size()) {
      part->set_draft_top_k(4);
    } else {
      part->set_next_token(static_cast<uint32_t>(prompt[end]));
    }
    const auto response = group.Step(request);
    REQUIRE(response.ok());
    seen.TakePrompt(response->results(0));
    if (end == prompt.size()) seen.Take(response->results(0));
  }
  for (uint32_t i = 0; i < kTokens; ++i) {
    v1::StepRequest request;
    AddTree(&request, 1, length + i, {seen.last}, {})->set_draft_top_k(4);
    const auto response = group.Step(request);
    REQUIRE(response.ok());
    seen.Take(response->results(0));
  }
  return seen;
}

}  // namespace

TEST_CASE("chunk sizes and company change no bit") {
  const int tp = GENERATE(1, 2);
  EngineOptions options = GoldenOptions(true);
  options.kv_dtype = GENERATE(kernels::DType::kF32, kernels::DType::kBF16);
  CAPTURE(tp, options.kv_dtype == kernels::DType::kBF16);
  auto started = EngineGroup::Start(options, tp);
  REQUIRE(started.ok());
  EngineGroup& group = **started;
  std::mt19937 random(3);
  constexpr int kRequests = 8;
  std::vector<std::vector<int32_t>> prompts;
  std::vector<Seen> alone;
  for (int i = 0; i < kRequests; ++i) {
    prompts.push_back(RandomTokens(random, 1 + random() % 60));
    alone.push_back(RunAlone(group, prompts.back(), i, 512));
    const Seen chunked = RunAlone(group, prompts.back(), i, 16);
    CHECK(chunked.prompt == alone.back().prompt);
    CHECK(chunked.generated == alone.back().generated);
  }

  // All eight in every step; each starts one step after the one before, so that prefill and decoding mix.
  group.Restart();
  std::vector<Seen> together(kRequests);
  std::vector<int> done(kRequests, -1);
  for (int step = 0; step < kRequests + kTokens + 1; ++step) {
    v1::StepRequest request;
    std::vector<int> order;
    if (step < kRequests) {
      const auto length = static_cast<uint32_t>(prompts[step].size());
      AddCreate(&request, step + 1, Sampling(length, step));
      v1::PrefillChunk* chunk = AddChunk(&request, step + 1, 0, prompts[step]);
      chunk->set_sample(true);
      chunk->set_draft_top_k(4);
      chunk->set_prompt_logprobs(2);
      order.push_back(step);
    }
    for (int i = 0; i < std::min(step, kRequests); ++i) {
      if (done[i] >= kTokens) continue;
      AddTree(&request, i + 1, static_cast<uint32_t>(prompts[i].size()) + done[i], {together[i].last}, {})
          ->set_draft_top_k(4);
      order.push_back(i);
    }
    const auto response = group.Step(request);
    REQUIRE(response.ok());
    REQUIRE(response->results_size() == static_cast<int>(order.size()));
    for (size_t r = 0; r < order.size(); ++r) {
      const int i = order[r];
      together[i].TakePrompt(response->results(static_cast<int>(r)));
      together[i].Take(response->results(static_cast<int>(r)));
      ++done[i];
    }
  }
  for (int i = 0; i < kRequests; ++i) {
    CAPTURE(i);
    CHECK(together[i].prompt == alone[i].prompt);
    CHECK(together[i].generated == alone[i].generated);
  }
}

TEST_CASE("a forked sequence goes on as if it had computed the prefix itself, drafter included") {
  auto started = EngineGroup::Start(GoldenOptions(true), 1);
  REQUIRE(started.ok());
  EngineGroup& group = **started;
  std::mt19937 random(5);
  const std::vector<int32_t> prompt = RandomTokens(random, 50);
  const Seen alone = RunAlone(group, prompt, 9, 512);

  group.Restart();
  constexpr size_t kShared = 37;
  v1::StepRequest first;
  AddCreate(&first, 7, Sampling(50, 1));
  std::vector<int32_t> other(prompt.begin(), prompt.begin() + kShared);
  other.insert(other.end(), {1, 2, 3});
  AddChunk(&first, 7, 0, other);
  REQUIRE(group.Step(first).ok());
  v1::StepRequest second;
  v1::SamplingState sampling = Sampling(50, 9);
  AddFork(&second, 1, 7, kShared, sampling);
  AddFree(&second, 7);
  v1::PrefillChunk* rest = AddChunk(&second, 1, kShared, {prompt.begin() + kShared, prompt.end()});
  rest->set_sample(true);
  rest->set_draft_top_k(4);
  auto response = group.Step(second);
  REQUIRE(response.ok());
  Seen forked;
  forked.Take(response->results(0));
  for (uint32_t i = 0; i < kTokens; ++i) {
    v1::StepRequest request;
    AddTree(&request, 1, 50 + i, {forked.last}, {})->set_draft_top_k(4);
    response = group.Step(request);
    REQUIRE(response.ok());
    forked.Take(response->results(0));
  }
  CHECK(forked.generated == alone.generated);
}

TEST_CASE("bf16 KV rows cost half the memory and little accuracy") {
  const std::vector<int32_t> prompt = {703, 80, 91, 337, 269, 12, 500, 44};
  std::vector<v1::SequenceResult> results;
  std::vector<uint64_t> slots;
  for (const auto dtype : {kernels::DType::kF32, kernels::DType::kBF16}) {
    EngineOptions options = GoldenOptions(true);
    options.kv_dtype = dtype;
    options.kv_slots = 0;
    options.kv_bytes = 8 << 20;
    auto group = EngineGroup::Start(options, 1);
    REQUIRE(group.ok());
    v1::DescribeResponse description;
    (*group)->engine(0).Describe(&description);
    slots.push_back(description.kv_slots_total());
    CHECK(description.kv_dtype() == (dtype == kernels::DType::kF32 ? "f32" : "bf16"));
    v1::StepRequest request;
    AddCreate(&request, 1, Sampling(8, 1));
    v1::PrefillChunk* chunk = AddChunk(&request, 1, 0, prompt);
    chunk->set_sample(true);
    chunk->set_prompt_logprobs(1);
    const auto response = (*group)->Step(request);
    REQUIRE(response.ok());
    results.push_back(response->results(0));
  }
  CHECK(slots[1] >= 2 * slots[0]);
  REQUIRE(results[0].prompt_logprobs_size() == results[1].prompt_logprobs_size());
  for (int i = 0; i < results[0].prompt_logprobs_size(); ++i) {
    CHECK(std::abs(results[0].prompt_logprobs(i).token().logprob() -
                   results[1].prompt_logprobs(i).token().logprob()) < 0.1);
  }
}

TEST_CASE("a freed sequence's slots come back") {
  auto started = EngineGroup::Start(GoldenOptions(false), 1);
  REQUIRE(started.ok());
  v1::StepRequest request;
  AddCreate(&request, 1, GreedySampling(5));
  AddChunk(&request, 1, 0, {1, 2, 3, 4, 5})->set_sample(true);
  auto response = (*started)->Step(request);
  REQUIRE(response.ok());
  CHECK(response->pool().slots_used() == 5);
  // Two nodes that the target does not choose: only the root is kept.
  v1::StepRequest verify;
  const auto root = static_cast<int32_t>(response->results(0).tokens(0));
  AddTree(&verify, 1, 5, {root, 1000, 1001}, {0, 0});
  response = (*started)->Step(verify);
  REQUIRE(response.ok());
  CHECK(response->pool().slots_used() == 6);
  v1::StepRequest free;
  AddFree(&free, 1);
  response = (*started)->Step(free);
  REQUIRE(response.ok());
  CHECK(response->pool().slots_used() == 0);
  CHECK(response->pool().sequences() == 0);
}

TEST_CASE("the phases of a step do not overlap") {
  auto group = EngineGroup::Start(GoldenOptions(true), 4);
  REQUIRE(group.ok());
  v1::StepRequest request;
  AddPrompt(&request, 1, GreedySampling(24), std::vector<int32_t>(24, 7))->set_draft_top_k(4);
  for (uint32_t position = 24; position < 30; ++position) {
    const auto response = (*group)->Step(request);
    REQUIRE(response.ok());
    const v1::StepTimings& t = response->timings();
    const double phases = t.attention_us() + t.moe_us() + t.dense_us() + t.draft_us() - t.draft_wait_us() +
                          t.sample_us() - t.sample_wait_us() + t.collective_wait_us();
    CHECK(t.moe_us() > 0);
    CHECK(t.dense_us() > 0);
    CHECK(phases <= 1.001 * t.total_us() + 1);
    request.Clear();
    AddTree(&request, 1, position, {static_cast<int32_t>(response->results(0).tokens(0))}, {})
        ->set_draft_top_k(4);
  }
}

}  // namespace kdt::testing
