// Random loads on small pools, with cancellations, priorities, lost groups and speculation: every answer is
// what its history says, no step is one that a rank must refuse, and the slots are counted right.
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <random>

#include "tests/coordinator/scheduler/fixture.h"

namespace kdt::testing {
namespace {

struct Running {
  RequestSpec spec;
  std::shared_ptr<Collector> client;
  uint64_t id = 0;
  bool cancelled = false;
};

RequestSpec DrawSpec(std::mt19937& random, uint32_t context) {
  const auto length = 1 + random() % 90;
  // Few different beginnings, so that prefixes are shared.
  RequestSpec spec =
      Spec(Prompt(length, random() % 3), 1 + random() % (context - length > 80 ? 80 : context - length));
  if (random() % 2 == 0) spec.prompt.back() = random() % 1024;
  spec.sampling.set_temperature(random() % 2 == 0 ? 0 : 1);
  spec.sampling.set_seed(random());
  spec.n = random() % 5 == 0 ? 1 + random() % 3 : 1;
  spec.priority = static_cast<int32_t>(random() % 3);
  spec.prompt_logprobs = random() % 6 == 0 ? 1 : 0;
  spec.sampling.set_logprobs(random() % 3 == 0 ? 1 : 0);
  spec.mode = static_cast<SpeculationMode>(random() % 4);
  if (random() % 2 == 0) spec.budget = random() % 20;
  return spec;
}

void CheckAnswer(Harness& harness, Running& running) {
  const absl::Status status = running.client->Wait();
  INFO(status.ToString());
  REQUIRE((status.ok() || (running.cancelled && absl::IsCancelled(status))));
  CHECK_FALSE(running.client->ended_twice());
  for (uint32_t index = 0; index < running.spec.n; ++index) {
    const auto sample = running.client->sample(index);
    const auto expected = harness.Expected(running.spec, running.spec.max_tokens, index);
    REQUIRE(sample.tokens.size() <= expected.size());
    CHECK(std::equal(sample.tokens.begin(), sample.tokens.end(), expected.begin()));
    CHECK_FALSE(sample.late);
    if (!status.ok()) continue;
    CHECK(sample.tokens.size() == expected.size());
    REQUIRE(sample.complete.has_value());
    const size_t prompt_logprobs = running.spec.prompt_logprobs > 0 ? running.spec.prompt.size() - 1 : 0;
    CHECK(static_cast<size_t>(sample.complete->prompt_logprobs_size()) == prompt_logprobs);
    CHECK(sample.logprobs.size() == (running.spec.sampling.logprobs() > 0 ? expected.size() : 0));
  }
}

}  // namespace

TEST_CASE("random loads give right answers and legal steps") {
  std::mt19937 random(20260517);
  for (int round = 0; round < 25; ++round) {
    ToyOptions toy;
    toy.slots = 180 + random() % 400;
    toy.max_context = 175;
    toy.max_sequences = 3 + random() % 10;
    toy.max_rows = 8 + random() % 120;
    toy.max_tree_nodes = 1 + random() % 40;
    toy.block_size = random() % 3 == 0 ? 0 : 8;
    SchedulerOptions options;
    options.registry = std::make_shared<prometheus::Registry>();
    options.prefill_chunk = 1 + random() % 60;
    options.max_running = 1 + random() % 10;
    options.rejoin = true;
    if (random() % 2 == 0) options.speculation.budget = random() % 30;
    Harness harness(toy, options);
    const uint32_t lose_every = random() % 2 == 0 ? 0 : 20 + random() % 40;
    uint32_t steps = 0;
    harness.group.on_step = [&](const v1::StepRequest&) {
      // Not for ever: with small chunks, a lap may be too short to compute a prompt again.
      const bool lost = lose_every > 0 && ++steps % lose_every == 0 && steps < 3 * lose_every;
      return lost ? absl::UnavailableError("rank 1 is gone") : absl::OkStatus();
    };
    harness.Start();
    std::vector<Running> all;
    for (int i = 0; i < 20; ++i) {
      Running running;
      running.spec = DrawSpec(random, toy.max_context);
      running.client = std::make_shared<Collector>();
      // While the group forms again nothing is taken; a client would try again, too.
      absl::StatusOr<uint64_t> id = absl::UnavailableError("");
      for (int attempt = 0; attempt < 2000 && absl::IsUnavailable(id.status()); ++attempt) {
        id = harness.scheduler->Submit(running.spec, running.client);
        if (!id.ok()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      INFO(id.status().ToString());
      REQUIRE(id.ok());
      running.id = *id;
      all.push_back(std::move(running));
      if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
      if (random() % 4 == 0) {
        Running& victim = all[random() % all.size()];
        victim.cancelled = true;
        harness.scheduler->Cancel(victim.id, absl::CancelledError("test"));
      }
    }
    INFO("round " << round);
    for (Running& running : all) CheckAnswer(harness, running);
    CHECK(harness.scheduler->Drain(std::chrono::seconds(20)));
    harness.scheduler->Stop();
    CHECK(harness.group.step_error().empty());
    const std::string text = prometheus::TextSerializer().Serialize(options.registry->Collect());
    CHECK(text.find("\nkdt_slot_count_differences_total 0\n") != std::string::npos);
  }
}

}  // namespace kdt::testing
