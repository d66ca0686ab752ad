// Live relocation between steps moves K/V of target and drafter without changing a bit of what follows.
#include <algorithm>

#include "tests/support/catch.h"
#include "tests/worker/support/engine_group.h"

namespace kdt::testing {
namespace {

constexpr uint64_t kFillers = 12;
constexpr uint32_t kPrompt = 4;
constexpr uint32_t kSteps = 36;

v1::SamplingState Sampling(uint64_t seed) {
  v1::SamplingState sampling = GreedySampling(kPrompt);
  sampling.set_temperature(1);
  sampling.set_seed(seed);
  sampling.set_logprobs(1);
  return sampling;
}

v1::PrefillChunk* Start(v1::StepRequest* request, uint64_t id) {
  v1::CreateSequence* create = request->add_ops()->mutable_create();
  create->set_sequence_id(id);
  create->set_expected_tokens(kPrompt);
  *create->mutable_sampling() = Sampling(id);
  return AddChunk(request, id, 0, {static_cast<int32_t>(id), 7, 8, 9});
}

// Everything drawn and drafted for sequence 1. With fillers it first has to grow through the holes between
// them, then they go and its rows are moved together.
std::string Run(EngineGroup& group, bool fillers, uint64_t* moved_bytes, uint32_t* most_runs) {
  group.Restart();
  v1::StepRequest start;
  v1::PrefillChunk* chunk = Start(&start, 1);
  chunk->set_sample(true);
  chunk->set_draft_top_k(2);
  for (uint64_t id = 2; fillers && id < 2 + kFillers; ++id) Start(&start, id);
  auto response = group.Step(start);
  std::string seen;
  *most_runs = 0;
  for (uint32_t step = 0; step <= kSteps; ++step) {
    REQUIRE(response.ok());
    const v1::SequenceResult& result = response->results(0);
    seen += result.logprobs(0).SerializeAsString() + result.draft().SerializeAsString();
    *moved_bytes = response->pool().moved_bytes();
    if (step > kSteps / 2) *most_runs = std::max(*most_runs, response->pool().runs());
    if (step == kSteps) break;
    v1::StepRequest decode;
    for (uint64_t id = 2; fillers && id < 2 + kFillers; ++id) {
      if (step == (id % 2 == 0 ? 0 : kSteps / 2)) AddFree(&decode, id);
    }
    AddTree(&decode, 1, kPrompt + step, {static_cast<int32_t>(result.tokens(0))}, {})->set_draft_top_k(2);
    response = group.Step(decode);
  }
  return seen;
}

}  // namespace

TEST_CASE("a sequence that is moved between steps goes on with the same bits") {
  const int tp = GENERATE(1, 2);
  CAPTURE(tp);
  EngineOptions options = GoldenOptions(true);
  options.kv_slots = (kFillers + 1) * kPrompt + 2;  // full at the start
  auto group = EngineGroup::Start(options, tp);
  REQUIRE(group.ok());
  uint64_t moved = 0;
  uint32_t runs = 0;
  const std::string alone = Run(**group, false, &moved, &runs);
  CHECK(moved == 0);
  const std::string among = Run(**group, true, &moved, &runs);
  CHECK(moved > 0);
  CHECK(runs <= 3);
  CHECK(among == alone);
}

}  // namespace kdt::testing
