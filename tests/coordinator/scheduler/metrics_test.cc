// The coordinator's series after known work.
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include "tests/coordinator/scheduler/fixture.h"

namespace kdt::testing {

TEST_CASE("the pool's size is told before the first step") {
  SchedulerOptions options;
  options.registry = std::make_shared<prometheus::Registry>();
  ToyOptions toy;
  Harness harness(toy, options);
  std::string at_first_step;
  harness.group.on_step = [&](const v1::StepRequest&) {
    if (at_first_step.empty())
      at_first_step = prometheus::TextSerializer().Serialize(options.registry->Collect());
    return absl::OkStatus();
  };
  harness.Start();
  CHECK(harness.Submit(Spec(Prompt(4), 2))->Wait().ok());
  harness.scheduler->Stop();
  INFO(at_first_step);
  CHECK(at_first_step.find("\nkdt_kv_slots{state=\"free\"} " + std::to_string(toy.slots) + "\n") !=
        std::string::npos);
}

TEST_CASE("metrics count what was done") {
  ToyOptions toy;
  toy.block_size = 8;
  SchedulerOptions options;
  options.registry = std::make_shared<prometheus::Registry>();
  options.speculation.budget = 16;
  options.max_waiting = 2;
  Harness harness(toy, options);
  harness.group.step_time = std::chrono::milliseconds(2);
  harness.group.Form();
  RequestSpec spec = Spec(Prompt(40), 30);
  const auto first = harness.Submit(spec);
  spec.prompt[0] = 600;
  const auto second = harness.Submit(spec);
  harness.scheduler->Start();
  REQUIRE(first->Wait().ok());
  REQUIRE(second->Wait().ok());
  const auto cancelled = harness.Submit(Spec(Prompt(20), 900));
  REQUIRE(cancelled->WaitTokens(0, 1));
  harness.scheduler->Cancel(harness.last_id, absl::CancelledError("gone"));
  cancelled->Wait().IgnoreError();
  harness.scheduler->metrics().Rejected(absl::InvalidArgumentError("x"));
  REQUIRE(harness.scheduler->Drain(std::chrono::seconds(10)));
  harness.scheduler->Stop();

  const std::string text = prometheus::TextSerializer().Serialize(options.registry->Collect());
  INFO(text);
  const auto has = [&text](const std::string& line) { return text.find(line + "\n") != std::string::npos; };
  CHECK(has("kdt_requests_total{finish_reason=\"length\"} 2"));
  CHECK(has("kdt_requests_total{finish_reason=\"stop\"} 0"));
  CHECK(has("kdt_requests_total{finish_reason=\"cancelled\"} 1"));
  CHECK(has("kdt_admission_rejections_total{reason=\"invalid\"} 1"));
  CHECK(has("kdt_requests_running 0"));
  CHECK(has("kdt_requests_waiting 0"));
  CHECK(has("kdt_prompt_tokens_total 80"));
  CHECK(has("kdt_rank_up{rank=\"0\"} 0"));
  CHECK(has("kdt_preemptions_total 0"));
  CHECK(text.find("\nkdt_kv_slots{state=\"free\"} ") != std::string::npos);
  CHECK_FALSE(has("kdt_kv_slots{state=\"free\"} 0"));
  CHECK(has("kdt_epoch 1"));
  CHECK(has("kdt_request_seconds_count 2"));
  CHECK(has("kdt_time_to_first_token_seconds_count 3"));
  // A block of eight is the root and seven depths.
  CHECK(text.find("by_depth_total{depth=\"7\"}") != std::string::npos);
  CHECK(text.find("by_depth_total{depth=\"8\"}") == std::string::npos);
  for (const char* name :
       {"kdt_accepted_tokens_by_depth_total{depth=\"1\"}", "kdt_tree_build_seconds_count",
        "kdt_transport_seconds_count", "kdt_step_seconds_count", "kdt_drafted_tokens_total",
        "kdt_rounds_total", "kdt_tree_nodes_count", "kdt_inter_token_seconds_count"}) {
    CHECK(text.find(std::string("\n") + name + " ") != std::string::npos);
    CHECK_FALSE(has(std::string(name) + " 0"));
  }
}

}  // namespace kdt::testing
