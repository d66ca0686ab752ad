// Hostile step requests: each is refused with the field's name and changes nothing.
#include <cmath>
#include <functional>
#include <limits>

#include "tests/support/catch.h"
#include "tests/worker/support/engine_group.h"

namespace kdt::testing {
namespace {

struct Case {
  const char* named;  // must occur in the error
  std::function<void(v1::StepRequest*)> make;
};

v1::SamplingState Changed(const std::function<void(v1::SamplingState*)>& change) {
  v1::SamplingState sampling = GreedySampling(3);
  change(&sampling);
  return sampling;
}

Case BadSampling(const char* named, const std::function<void(v1::SamplingState*)>& change) {
  return {named, [change](v1::StepRequest* request) { AddCreate(request, 50, Changed(change)); }};
}

const float kNan = std::numeric_limits<float>::quiet_NaN();
const float kInfinity = std::numeric_limits<float>::infinity();

// Sequence 1 is alive with 3 committed tokens.
const Case kCases[] = {
    {"ops[0]: no op", [](auto* r) { r->add_ops(); }},
    {"ops[0].create.sequence_id", [](auto* r) { AddCreate(r, 1, GreedySampling(3)); }},
    {"ops[1].create.sequence_id",
     [](auto* r) {
       AddCreate(r, 50, GreedySampling(3));
       AddCreate(r, 50, GreedySampling(3));
     }},
    {"ops[0].fork.parent_id", [](auto* r) { AddFork(r, 50, 99, 1, GreedySampling(3)); }},
    {"ops[0].fork.length", [](auto* r) { AddFork(r, 50, 1, 4, GreedySampling(3)); }},
    {"ops[0].fork.length", [](auto* r) { AddFork(r, 50, 1, 0, GreedySampling(3)); }},
    {"ops[0].free.sequence_id", [](auto* r) { AddFree(r, 99); }},
    {"ops[1].free.sequence_id",
     [](auto* r) {
       AddFree(r, 1);
       AddFree(r, 1);
     }},
    {"sequences are alive",
     [](auto* r) {
       for (uint64_t id = 100; id < 140; ++id) AddCreate(r, id, GreedySampling(3));
     }},
    BadSampling("temperature", [](auto* s) { s->set_temperature(-1); }),
    BadSampling("temperature", [](auto* s) { s->set_temperature(kNan); }),
    BadSampling("temperature", [](auto* s) { s->set_temperature(kInfinity); }),
    BadSampling("top_p", [](auto* s) { s->set_top_p(0); }),
    BadSampling("top_p", [](auto* s) { s->set_top_p(kNan); }),
    BadSampling("min_p", [](auto* s) { s->set_min_p(1.5f); }),
    BadSampling("repetition_penalty", [](auto* s) { s->set_repetition_penalty(0); }),
    BadSampling("frequency_penalty", [](auto* s) { s->set_frequency_penalty(kNan); }),
    BadSampling("presence_penalty", [](auto* s) { s->set_presence_penalty(kInfinity); }),
    BadSampling("logit_bias", [](auto* s) { (*s->mutable_logit_bias())[1024] = 1; }),
    BadSampling("logit_bias", [](auto* s) { (*s->mutable_logit_bias())[3] = kNan; }),
    BadSampling("stop_token_ids", [](auto* s) { s->add_stop_token_ids(1u << 31); }),
    BadSampling("logprobs", [](auto* s) { s->set_logprobs(65); }),
    {"prefill[0].sequence_id", [](auto* r) { AddChunk(r, 99, 0, {1}); }},
    {"prefill[0].start", [](auto* r) { AddChunk(r, 1, 2, {1}); }},
    {"prefill[0].start", [](auto* r) { AddChunk(r, 1, 0xffffffffu, {1}); }},
    {"prefill[0].tokens is empty", [](auto* r) { AddChunk(r, 1, 3, {}); }},
    {"prefill[0].tokens[1]",
     [](auto* r) {
       AddChunk(r, 1, 3, {1, 1024});
     }},
    {"prefill[0].tokens[0]", [](auto* r) { AddChunk(r, 1, 3, {-1}); }},
    {"prefill[0].draft_top_k", [](auto* r) { AddChunk(r, 1, 3, {1})->set_draft_top_k(4); }},
    {"prefill[0].prompt_logprobs", [](auto* r) { AddChunk(r, 1, 3, {1})->set_prompt_logprobs(65); }},
    {"prefill[0].next_token",
     [](auto* r) {
       v1::PrefillChunk* chunk = AddChunk(r, 1, 3, {1});
       chunk->set_prompt_logprobs(1);
       chunk->set_next_token(1024);
     }},
    {"prefill[1].sequence_id",
     [](auto* r) {
       AddChunk(r, 1, 3, {1});
       AddChunk(r, 1, 4, {1});
     }},
    {"verify[0].sequence_id",
     [](auto* r) {
       AddChunk(r, 1, 3, {1});
       AddTree(r, 1, 4, {1}, {});
     }},
    {"pass the context", [](auto* r) { AddChunk(r, 1, 3, std::vector<int32_t>(1022, 1)); }},
    {"rows, the most is 512", [](auto* r) { AddChunk(r, 1, 3, std::vector<int32_t>(513, 1)); }},
    {"verify[0].tokens is empty", [](auto* r) { AddTree(r, 1, 3, {}, {}); }},
    {"verify[0].tokens[2]",
     [](auto* r) {
       AddTree(r, 1, 3, {1, 2, 5000}, {0, 0});
     }},
    {"verify[0].parents has",
     [](auto* r) {
       AddTree(r, 1, 3, {1, 2, 3}, {0});
     }},
    {"verify[0].parents[1]",
     [](auto* r) {
       AddTree(r, 1, 3, {1, 2, 3}, {0, 2});
     }},
    {"verify[0].parents[0]",
     [](auto* r) {
       AddTree(r, 1, 3, {1, 2, 3}, {-1, 0});
     }},
    {"nodes, the most is 256",
     [](auto* r) { AddTree(r, 1, 3, std::vector<int32_t>(257, 1), std::vector<int32_t>(256, 0)); }},
    {"verify[0].draft_top_k", [](auto* r) { AddTree(r, 1, 3, {1}, {})->set_draft_top_k(65); }},
};

// What follows must be the same whether or not a bad request came in between.
std::string GoOn(EngineGroup& group) {
  v1::StepRequest request;
  AddTree(&request, 1, 3, {7, 8, 9}, {0, 1});
  const auto response = group.Step(request);
  REQUIRE(response.ok());
  return std::to_string(response->digest()) + response->results(0).SerializeAsString();
}

void Begin(EngineGroup& group) {
  group.Restart();
  v1::StepRequest request;
  AddCreate(&request, 1, GreedySampling(3));
  AddChunk(&request, 1, 0, {1, 2, 3});
  REQUIRE(group.Step(request).ok());
}

}  // namespace

TEST_CASE("bad requests are refused by name and change nothing") {
  const bool drafter = GENERATE(false, true);
  auto started = EngineGroup::Start(GoldenOptions(drafter), 1);
  REQUIRE(started.ok());
  EngineGroup& group = **started;
  Begin(group);
  const std::string expected = GoOn(group);
  for (const Case& bad : kCases) {
    CAPTURE(bad.named);
    Begin(group);
    // A harmless op ahead of the bad part must not be applied either.
    v1::StepRequest request;
    bad.make(&request);
    AddCreate(&request, 60, GreedySampling(3));
    const auto response = group.Step(request);
    REQUIRE(!response.ok());
    CHECK(std::string(response.status().message()).find(bad.named) != std::string::npos);
    CHECK(GoOn(group) == expected);
  }
}

TEST_CASE("a step out of order, and one before any epoch, are refused") {
  auto started = EngineGroup::Start(GoldenOptions(false), 1);
  REQUIRE(started.ok());
  v1::StepRequest request;
  v1::StepResponse response;
  request.set_step(3);
  CHECK((*started)->engine(0).Step(request, &response).code() == absl::StatusCode::kInvalidArgument);
  REQUIRE((*started)->engine(0).StartEpoch(nullptr).ok());
  request.set_step(1);
  CHECK((*started)->engine(0).Step(request, &response).code() == absl::StatusCode::kFailedPrecondition);
}

TEST_CASE("more rows than slots is an error that leaves the sequences as they were") {
  EngineOptions options = GoldenOptions(false);
  options.kv_slots = 10;
  auto started = EngineGroup::Start(options, 1);
  REQUIRE(started.ok());
  EngineGroup& group = **started;
  Begin(group);
  v1::StepRequest request;
  AddTree(&request, 1, 3, std::vector<int32_t>(12, 5), std::vector<int32_t>(11, 0));
  const auto response = group.Step(request);
  REQUIRE(!response.ok());
  CHECK(response.status().code() == absl::StatusCode::kResourceExhausted);
  const std::string after = GoOn(group);
  Begin(group);
  CHECK(after == GoOn(group));
}

TEST_CASE("a tree may reach to the end of the context, not beyond it") {
  EngineOptions options = GoldenOptions(false);
  options.max_context = 6;
  auto started = EngineGroup::Start(options, 1);
  REQUIRE(started.ok());
  Begin(**started);
  v1::StepRequest beyond;
  AddTree(&beyond, 1, 3, {1, 2, 3, 4}, {0, 1, 2});
  CHECK((*started)->Step(beyond).status().code() == absl::StatusCode::kOutOfRange);
  // More nodes than positions, but none deeper than the context.
  v1::StepRequest fits;
  AddTree(&fits, 1, 3, {1, 2, 3, 4, 5, 6}, {0, 0, 0, 1, 1});
  CHECK((*started)->Step(fits).ok());
}

}  // namespace kdt::testing
