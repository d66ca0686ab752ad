// A scheduler over a toy group, with the golden model's tokenizer.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "coordinator/scheduler/scheduler.h"
#include "coordinator/tokenizer/tokenizer.h"
#include "tests/coordinator/scheduler/collector.h"
#include "tests/coordinator/scheduler/toy_group.h"
#include "tests/support/catch.h"

namespace kdt::testing {

inline std::shared_ptr<const Tokenizer> GoldenTokenizer() {
  static const auto tokenizer = Tokenizer::Load(std::string(KDT_GOLDENS_DIR) + "/model");
  REQUIRE(tokenizer.ok());
  return *tokenizer;
}

inline std::vector<uint32_t> Prompt(size_t length, uint32_t salt = 1) {
  std::vector<uint32_t> prompt;
  for (size_t i = 0; i < length; ++i) prompt.push_back(static_cast<uint32_t>((salt * 131 + i * 7) % 700));
  return prompt;
}

inline RequestSpec Spec(std::vector<uint32_t> prompt, uint32_t max_tokens) {
  RequestSpec spec;
  spec.request_id = "test";
  spec.prompt = std::move(prompt);
  spec.max_tokens = max_tokens;
  spec.sampling.set_temperature(0);
  spec.sampling.set_top_p(1);
  spec.sampling.set_repetition_penalty(1);
  spec.sampling.set_seed(5);
  spec.sampling.set_prompt_length(static_cast<uint32_t>(spec.prompt.size()));
  return spec;
}

struct Harness {
  explicit Harness(const ToyOptions& toy = {}, SchedulerOptions options = {})
      : group(toy), options_(options) {
    options_.vocab_size = toy.vocab;
    options_.on_group_lost = [this](const std::string&) { lost = true; };
    scheduler = std::make_unique<Scheduler>(options_, &group, TextTools{GoldenTokenizer(), std::nullopt});
    group.on_change = [this] { scheduler->Wake(); };
  }
  ~Harness() { scheduler->Stop(); }

  void Start() {
    group.Form();
    scheduler->Start();
  }
  std::shared_ptr<Collector> Submit(const RequestSpec& spec) {
    auto collector = std::make_shared<Collector>();
    const auto id = scheduler->Submit(spec, collector);
    REQUIRE(id.ok());
    last_id = *id;
    return collector;
  }
  // What the request must give.
  std::vector<uint32_t> Expected(const RequestSpec& spec, uint32_t count, uint32_t index = 0) {
    v1::SamplingState sampling = spec.sampling;
    sampling.set_seed(sampling.seed() + index);
    return group.rank().Answer(spec.prompt, sampling, count);
  }

  ToyGroup group;
  SchedulerOptions options_;
  std::unique_ptr<Scheduler> scheduler;
  uint64_t last_id = 0;
  std::atomic<bool> lost{false};
};

}  // namespace kdt::testing
