// Losing the group: everybody is told, or everybody goes on in the next epoch.
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include "tests/coordinator/scheduler/fixture.h"

namespace kdt::testing {

TEST_CASE("without rejoin a lost group ends every request with UNAVAILABLE") {
  Harness harness;
  harness.group.step_time = std::chrono::milliseconds(2);
  std::atomic<bool> fail{false};
  harness.group.on_step = [&](const v1::StepRequest&) {
    return fail ? absl::UnavailableError("rank 3 is gone") : absl::OkStatus();
  };
  harness.Start();
  const auto client = harness.Submit(Spec(Prompt(20), 900));
  REQUIRE(client->WaitTokens(0, 3));
  fail = true;
  const absl::Status status = client->Wait();
  CHECK(absl::IsUnavailable(status));
  CHECK(status.message().find("rank") == std::string_view::npos);  // internal names stay inside
  CHECK(harness.lost);
  const auto refused = harness.scheduler->Submit(Spec(Prompt(10), 5), std::make_shared<Collector>());
  CHECK(absl::IsUnavailable(refused.status()));
}

TEST_CASE("a rank that stops answering is noticed while nothing runs") {
  Harness harness;
  harness.group.on_step = [](const v1::StepRequest& step) {
    CHECK(step.prefill_size() + step.verify_size() == 0);
    return absl::UnavailableError("rank 2 does not answer");
  };
  harness.Start();
  for (int i = 0; i < 4000 && !harness.lost; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(harness.lost);
}

TEST_CASE("with rejoin streams go on, no token repeated or missing") {
  ToyOptions toy;
  toy.block_size = 8;
  SchedulerOptions options;
  options.rejoin = true;
  options.prefill_chunk = 16;
  options.speculation.budget = 8;
  Harness harness(toy, options);
  int step = 0;
  harness.group.on_step = [&](const v1::StepRequest&) {
    return ++step % 9 == 0 ? absl::UnavailableError("rank 3 is gone") : absl::OkStatus();
  };
  harness.group.Form();
  std::vector<RequestSpec> specs;
  std::vector<std::shared_ptr<Collector>> clients;
  for (uint32_t i = 0; i < 5; ++i) {
    specs.push_back(Spec(Prompt(20 + 9 * i, i), 60));
    specs.back().n = i == 2 ? 3 : 1;
    specs.back().prompt_logprobs = i == 4 ? 2 : 0;
    clients.push_back(harness.Submit(specs.back()));
  }
  harness.scheduler->Start();
  for (uint32_t i = 0; i < 5; ++i) {
    REQUIRE(clients[i]->Wait().ok());
    for (uint32_t index = 0; index < specs[i].n; ++index) {
      const auto sample = clients[i]->sample(index);
      CHECK(sample.tokens == harness.Expected(specs[i], 60, index));
      CHECK(sample.complete->prompt_logprobs_size() == (i == 4 ? 55 : 0));
    }
  }
  CHECK(harness.group.epoch() > 1);
  CHECK(harness.group.step_error().empty());
}

TEST_CASE("a sample that ran is told as held until the group has formed again") {
  SchedulerOptions options;
  options.rejoin = true;
  options.registry = std::make_shared<prometheus::Registry>();
  std::atomic<bool> fail{false};
  Harness harness({}, options);
  harness.group.step_time = std::chrono::milliseconds(2);
  harness.group.on_step = [&](const v1::StepRequest&) {
    return fail ? absl::UnavailableError("rank 3 is gone") : absl::OkStatus();
  };
  const auto gauges = [&](const std::string& running, const std::string& held, const std::string& waiting) {
    const std::string text = prometheus::TextSerializer().Serialize(options.registry->Collect());
    INFO(text);
    CHECK(text.find("kdt_requests_running " + running + "\n") != std::string::npos);
    CHECK(text.find("kdt_requests_held " + held + "\n") != std::string::npos);
    CHECK(text.find("kdt_requests_waiting " + waiting + "\n") != std::string::npos);
  };
  harness.Start();
  RequestSpec spec = Spec(Prompt(20), 200);
  spec.n = 2;
  const auto client = harness.Submit(spec);
  REQUIRE(client->WaitTokens(0, 3));
  REQUIRE(client->WaitTokens(1, 3));
  gauges("2", "0", "0");
  harness.group.forms = false;
  fail = true;
  for (int i = 0; i < 2000 && harness.scheduler->running() > 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  CHECK(harness.scheduler->running() == 0);
  CHECK(harness.scheduler->held() == 2);
  CHECK(harness.scheduler->waiting() == 0);
  gauges("0", "2", "0");
  fail = false;
  harness.group.forms = true;
  REQUIRE(client->Wait().ok());
  REQUIRE(harness.scheduler->Drain(std::chrono::seconds(10)));
  CHECK(harness.scheduler->held() == 0);
  gauges("0", "0", "0");
}

TEST_CASE("an answer that does not fit its step ends the epoch") {
  Harness harness;
  harness.group.step_time = std::chrono::milliseconds(2);
  std::atomic<bool> spoil{false};
  harness.group.on_answer = [&](v1::StepResponse* response) {
    if (spoil && response->results_size() > 0) response->mutable_results(0)->add_tokens(5);
  };
  harness.Start();
  const auto client = harness.Submit(Spec(Prompt(20), 900));
  REQUIRE(client->WaitTokens(0, 3));
  spoil = true;
  CHECK(absl::IsUnavailable(client->Wait()));
  CHECK(harness.lost);
}

}  // namespace kdt::testing
