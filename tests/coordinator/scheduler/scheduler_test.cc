// The scheduler over a toy group: batching, chunks, stops, samples, cancellation, bounds.
#include <thread>

#include "tests/coordinator/scheduler/fixture.h"

namespace kdt::testing {

TEST_CASE("a request gets the tokens of its history, in chunks of any size") {
  for (const uint32_t chunk : {1u, 7u, 512u}) {
    SchedulerOptions options;
    options.prefill_chunk = chunk;
    Harness harness({}, options);
    harness.Start();
    const RequestSpec spec = Spec(Prompt(50), 20);
    const auto client = harness.Submit(spec);
    REQUIRE(client->Wait().ok());
    const auto sample = client->sample();
    CHECK(sample.tokens == harness.Expected(spec, 20));
    REQUIRE(sample.complete.has_value());
    CHECK(sample.complete->finish_reason() == v1::LENGTH);
    CHECK(sample.complete->usage().prompt_tokens() == 50);
    CHECK(sample.complete->usage().completion_tokens() == 20);
    CHECK(sample.complete->speculation().rounds() == 19);
    CHECK(sample.complete->seed() == 5);
    CHECK_FALSE(sample.late);
    CHECK_FALSE(client->ended_twice());
    CHECK(harness.group.step_error().empty());
  }
}

TEST_CASE("requests share steps: decoding goes on beside prefill") {
  SchedulerOptions options;
  options.prefill_chunk = 8;
  Harness harness({}, options);
  std::vector<std::shared_ptr<Collector>> clients;
  std::vector<RequestSpec> specs;
  harness.group.Form();
  for (uint32_t i = 0; i < 12; ++i) {
    specs.push_back(Spec(Prompt(30 + 10 * i, i), 25 + i));
    clients.push_back(harness.Submit(specs.back()));
  }
  harness.scheduler->Start();
  for (uint32_t i = 0; i < 12; ++i) {
    REQUIRE(clients[i]->Wait().ok());
    CHECK(clients[i]->sample().tokens == harness.Expected(specs[i], 25 + i));
  }
  CHECK(harness.group.rank().steps_with_prefill_and_decode() > 5);
  CHECK(harness.group.step_error().empty());
}

TEST_CASE("n samples share one prefill and differ by seed") {
  Harness harness;
  harness.Start();
  RequestSpec spec = Spec(Prompt(100), 10);
  spec.n = 4;
  spec.sampling.set_temperature(1);
  const auto client = harness.Submit(spec);
  REQUIRE(client->Wait().ok());
  for (uint32_t i = 0; i < 4; ++i) {
    CHECK(client->sample(i).tokens == harness.Expected(spec, 10, i));
    REQUIRE(client->sample(i).complete.has_value());
    CHECK(client->sample(i).complete->seed() == 5 + i);
  }
  CHECK(client->sample(0).tokens != client->sample(1).tokens);
  CHECK(harness.group.rank().prefilled_tokens() == 100 + 3);
}

TEST_CASE("stop rules look at every token and the earliest wins") {
  Harness harness;
  harness.Start();
  RequestSpec spec = Spec(Prompt(20), 30);
  const auto answer = harness.Expected(spec, 30);
  SECTION("a stop token is listed, named, and not text") {
    spec.sampling.add_stop_token_ids(answer[7]);
    const auto client = harness.Submit(spec);
    REQUIRE(client->Wait().ok());
    const auto sample = client->sample();
    CHECK(sample.tokens == std::vector<uint32_t>(answer.begin(), answer.begin() + 8));
    CHECK(sample.complete->finish_reason() == v1::STOP);
    CHECK(sample.complete->stop_token_id() == answer[7]);
    CHECK(sample.text == *GoldenTokenizer()->Decode(std::span(answer).first(7), false));
  }
  SECTION("min_tokens holds stop tokens off") {
    spec.sampling.add_stop_token_ids(answer[2]);
    spec.sampling.set_min_tokens(6);
    const auto client = harness.Submit(spec);
    REQUIRE(client->Wait().ok());
    const auto sample = client->sample();
    REQUIRE(sample.tokens.size() >= 6);
    for (size_t i = 0; i < 6; ++i) CHECK(sample.tokens[i] != answer[2]);
  }
  SECTION("a stop string cuts text and tokens, and the step that ran on is not seen") {
    const std::string stop = *GoldenTokenizer()->Decode(std::span(answer).subspan(5, 1), false);
    const std::vector<std::string> strings = {"no such text", stop};
    spec.stops = *StopStrings::Create(strings);
    spec.sampling.set_logprobs(2);
    const auto client = harness.Submit(spec);
    REQUIRE(client->Wait().ok());
    const auto sample = client->sample();
    REQUIRE(sample.tokens.size() <= 6);
    CHECK(sample.tokens == std::vector<uint32_t>(answer.begin(), answer.begin() + sample.tokens.size()));
    CHECK(sample.logprobs.size() == sample.tokens.size());
    CHECK(sample.complete->finish_reason() == v1::STOP);
    CHECK(sample.complete->stop_string() == stop);
    CHECK(sample.complete->usage().completion_tokens() == sample.tokens.size());
    CHECK(sample.text.find(stop) == std::string::npos);
  }
  CHECK(harness.group.step_error().empty());
}

TEST_CASE("log-probabilities of answer and prompt line up with their tokens") {
  SchedulerOptions options;
  options.prefill_chunk = 7;
  Harness harness({}, options);
  harness.Start();
  RequestSpec spec = Spec(Prompt(40), 9);
  spec.n = 2;
  spec.prompt_logprobs = 3;
  spec.sampling.set_logprobs(2);
  for (int round = 0; round < 2;
       ++round) {  // the second time the prompt is cached, and must be computed all the same
    const auto client = harness.Submit(spec);
    REQUIRE(client->Wait().ok());
    for (uint32_t index = 0; index < 2; ++index) {
      const auto sample = client->sample(index);
      REQUIRE(sample.logprobs.size() == 9);
      for (size_t i = 0; i < 9; ++i) {
        CHECK(sample.logprobs[i].token().token_id() == sample.tokens[i]);
        CHECK(sample.logprobs[i].top_size() == 2);
      }
      REQUIRE(sample.complete->prompt_logprobs_size() == 39);
      for (int i = 0; i < 39; ++i) {
        CHECK(sample.complete->prompt_logprobs(i).token().token_id() == spec.prompt[i + 1]);
        CHECK(sample.complete->prompt_logprobs(i).top_size() == 3);
      }
    }
  }
  CHECK(harness.group.step_error().empty());
}

TEST_CASE("the queue is bounded") {
  SchedulerOptions options;
  options.max_waiting = 3;
  Harness harness({}, options);
  harness.group.Form();  // the scheduler's thread does not run yet: everything waits
  for (int i = 0; i < 3; ++i) harness.Submit(Spec(Prompt(10), 5));
  CHECK(harness.scheduler->waiting() == 3);
  const auto refused = harness.scheduler->Submit(Spec(Prompt(10), 5), std::make_shared<Collector>());
  CHECK(absl::IsResourceExhausted(refused.status()));
}

TEST_CASE("larger priority first, then arrival") {
  SchedulerOptions options;
  options.max_running = 1;
  Harness harness({}, options);
  harness.group.Form();
  std::vector<std::vector<uint32_t>> order;
  harness.group.on_step = [&](const v1::StepRequest& step) {
    for (const auto& chunk : step.prefill()) order.emplace_back(chunk.tokens().begin(), chunk.tokens().end());
    return absl::OkStatus();
  };
  std::vector<std::shared_ptr<Collector>> clients;
  for (const int priority : {0, 0, 5}) {
    RequestSpec spec = Spec(Prompt(6, static_cast<uint32_t>(clients.size()) + 20), 3);
    spec.priority = priority;
    clients.push_back(harness.Submit(spec));
  }
  harness.scheduler->Start();
  for (const auto& client : clients) REQUIRE(client->Wait().ok());
  REQUIRE(order.size() == 3);
  CHECK(order[0] == Prompt(6, 22));
  CHECK(order[1] == Prompt(6, 20));
  CHECK(order[2] == Prompt(6, 21));
}

TEST_CASE("cancelling frees the slots with the next step") {
  Harness harness;
  harness.group.step_time = std::chrono::milliseconds(2);
  harness.Start();
  const auto client = harness.Submit(Spec(Prompt(20), 900));
  REQUIRE(client->WaitTokens(0, 3));
  harness.scheduler->Cancel(harness.last_id, absl::CancelledError("gone"));
  CHECK(absl::IsCancelled(client->Wait()));
  const size_t seen = client->sample().tokens.size();
  CHECK(harness.scheduler->Drain(std::chrono::seconds(10)));
  CHECK(harness.scheduler->running() == 0);
  harness.scheduler->Stop();
  CHECK(client->sample().tokens.size() == seen);
  CHECK(harness.group.rank().sequences() == 0);
  CHECK(harness.group.rank().used_slots() == 0);
}

TEST_CASE("a client that reads too slowly loses its request, not the others theirs") {
  Harness harness;
  harness.group.step_time = std::chrono::milliseconds(2);
  harness.Start();
  const auto slow = harness.Submit(Spec(Prompt(20), 900));
  const RequestSpec spec = Spec(Prompt(20, 3), 50);
  const auto other = harness.Submit(spec);
  slow->RefuseMore();
  CHECK(absl::IsResourceExhausted(slow->Wait()));
  CHECK(other->Wait().ok());
  CHECK(other->sample().tokens == harness.Expected(spec, 50));
}

TEST_CASE("a request that the ranks fail ends alone") {
  Harness harness;
  harness.group.step_time = std::chrono::milliseconds(2);
  std::atomic<bool> spoil{false};
  harness.group.on_answer = [&](v1::StepResponse* response) {
    for (auto& result : *response->mutable_results()) {
      if (spoil && result.sequence_id() == 1) result.set_error("NaN in the logits");
    }
  };
  harness.Start();
  const auto failing = harness.Submit(Spec(Prompt(20), 900));
  REQUIRE(failing->WaitTokens(0, 1));
  const RequestSpec spec = Spec(Prompt(20, 3), 50);
  const auto other = harness.Submit(spec);
  spoil = true;
  const absl::Status status = failing->Wait();
  CHECK(absl::IsInternal(status));
  CHECK(other->Wait().ok());
  CHECK(other->sample().tokens == harness.Expected(spec, 50));
}

TEST_CASE("draining refuses new requests and lets running ones end") {
  Harness harness;
  harness.Start();
  const auto client = harness.Submit(Spec(Prompt(20), 200));
  CHECK(harness.scheduler->Drain(std::chrono::seconds(20)));
  CHECK(client->Wait().ok());
  CHECK(client->sample().tokens.size() == 200);
  const auto refused = harness.scheduler->Submit(Spec(Prompt(10), 5), std::make_shared<Collector>());
  CHECK(absl::IsUnavailable(refused.status()));
}

}  // namespace kdt::testing
