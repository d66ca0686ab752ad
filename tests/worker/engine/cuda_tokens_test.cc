// Tokens of the shipped model on the GPU: against the CPU's, and with speculation against without. The
// contract (docs/architecture.md, "Speculation never changes the output"): a token differs only where the
// best two candidates are close. Both bounds are on the difference of their logits: activations of bf16 move
// a logit of this model by a few hundredths, rarely by a tenth; tree rows and plain rows differ by what sums
// of other order leave of that.
#include <algorithm>
#include <cmath>

#include "tests/worker/engine/cuda_group.h"

namespace kdt::testing {
namespace {

constexpr double kBackendGap = 0.5;
constexpr double kTreeGap = 0.25;
constexpr int kTokens = 120;
constexpr int kDraftTop = 4;

EngineOptions ShippedOptions(kernels::DType kv_dtype) {
  EngineOptions options;
  options.model_dir = std::string(KDT_SOURCE_DIR) + "/deploy/models/kimi-tiny";
  options.drafter_dir = options.model_dir + "/drafter";
  options.kv_dtype = kv_dtype;
  options.kv_slots = 4096;
  options.max_rows = 128;
  options.max_sequences = 8;
  options.max_context = 1024;
  return options;
}

std::vector<std::vector<int32_t>> Prompts() {
  std::vector<std::vector<int32_t>> prompts;
  for (int p = 0; p < 8; ++p) {
    std::vector<int32_t> tokens = {3840};
    for (int i = 0; i < 5 + 3 * p; ++i) tokens.push_back((37 * p + 11 * i * (p + 1)) % 2000 + 60);
    prompts.push_back(tokens);
  }
  return prompts;
}

// The token chosen at a position and how far the second best was behind.
struct Choice {
  int32_t token;
  double gap;
};

Choice Take(const v1::PositionLogprobs& logprobs) {
  return {static_cast<int32_t>(logprobs.token().token_id()),
          logprobs.top(0).logprob() - static_cast<double>(logprobs.top(1).logprob())};
}

v1::SamplingState Greedy(size_t prompt) {
  v1::SamplingState sampling = GreedySampling(static_cast<uint32_t>(prompt));
  sampling.set_logprobs(2);
  return sampling;
}

// Decodes along `given` where it is not empty, else along its own choices.
std::vector<Choice> Plain(EngineGroup& group, const std::vector<int32_t>& prompt,
                          const std::vector<Choice>& given) {
  group.Restart();
  v1::StepRequest request;
  AddCreate(&request, 1, Greedy(prompt.size()));
  AddChunk(&request, 1, 0, prompt)->set_sample(true);
  auto response = group.Step(request);
  std::vector<Choice> choices;
  while (true) {
    INFO(response.status());
    REQUIRE(response.ok());
    choices.push_back(Take(response->results(0).logprobs(0)));
    if (choices.size() == kTokens) return choices;
    const int32_t next = given.empty() ? choices.back().token : given[choices.size() - 1].token;
    v1::StepRequest decode;
    AddTree(&decode, 1, static_cast<uint32_t>(prompt.size() + choices.size() - 1), {next}, {});
    response = group.Step(decode);
  }
}

// The same tokens by trees: the drafter's best chain, and its second choices beside it.
std::vector<Choice> Speculated(EngineGroup& group, const std::vector<int32_t>& prompt, int* accepted) {
  group.Restart();
  v1::StepRequest request;
  AddCreate(&request, 1, Greedy(prompt.size()));
  v1::PrefillChunk* chunk = AddChunk(&request, 1, 0, prompt);
  chunk->set_sample(true);
  chunk->set_draft_top_k(kDraftTop);
  auto response = group.Step(request);
  std::vector<Choice> choices;
  while (true) {
    INFO(response.status());
    REQUIRE(response.ok());
    const v1::SequenceResult& result = response->results(0);
    *accepted += result.accepted_nodes_size();
    for (const v1::PositionLogprobs& logprobs : result.logprobs()) choices.push_back(Take(logprobs));
    if (choices.size() >= kTokens) {
      choices.resize(kTokens);
      return choices;
    }
    std::vector<int32_t> tokens = {choices.back().token}, parents;
    int32_t last = 0;
    for (int i = 0; i * kDraftTop < result.draft().token_ids_size(); ++i) {
      const int32_t parent = last;
      for (const int k : {0, 1}) {
        parents.push_back(parent);
        tokens.push_back(static_cast<int32_t>(result.draft().token_ids(i * kDraftTop + k)));
        if (k == 0) last = static_cast<int32_t>(tokens.size()) - 1;
      }
    }
    v1::StepRequest verify;
    AddTree(&verify, 1, static_cast<uint32_t>(prompt.size() + choices.size() - 1), tokens, parents)
        ->set_draft_top_k(kDraftTop);
    response = group.Step(verify);
  }
}

struct Divergences {
  int tokens = 0;
  int differ = 0;
  double largest_gap = 0;
  void Count(const Choice& expected, const Choice& got) {
    ++tokens;
    if (expected.token == got.token) return;
    ++differ;
    largest_gap = std::max(largest_gap, std::min(expected.gap, got.gap));
  }
  void Print(const char* what) const {
    std::printf("%s: %d of %d tokens differ (%.1f of 10,000), largest gap %.4f\n", what, differ, tokens,
                1e4 * differ / tokens, largest_gap);
  }
};

}  // namespace

TEST_CASE("cuda: the shipped model's tokens are the CPU's where the choice is clear") {
  KDT_NEED_GPU();
  const int tp = GENERATE(1, 2, 4);
  CAPTURE(tp);
  auto cpu = EngineGroup::Start(ShippedOptions(kernels::DType::kF32), 1);
  auto gpu = EngineGroup::Start(ShippedOptions(kernels::DType::kBF16), tp, nullptr, MakeGpu);
  REQUIRE(cpu.ok());
  INFO(gpu.status());
  REQUIRE(gpu.ok());
  Divergences found;
  for (const std::vector<int32_t>& prompt : Prompts()) {
    const std::vector<Choice> expected = Plain(**cpu, prompt, {});
    const std::vector<Choice> got = Plain(**gpu, prompt, expected);
    for (int i = 0; i < kTokens; ++i) found.Count(expected[i], got[i]);
  }
  found.Print(tp == 1   ? "tp 1, against the CPU"
              : tp == 2 ? "tp 2, against the CPU"
                        : "tp 4, against the CPU");
  CHECK(found.largest_gap <= kBackendGap);
  CHECK(found.differ <= found.tokens / 20);
}

TEST_CASE("cuda: speculation changes a token only where the choice is close") {
  KDT_NEED_GPU();
  auto gpu = EngineGroup::Start(ShippedOptions(kernels::DType::kBF16), 1, nullptr, MakeGpu);
  INFO(gpu.status());
  REQUIRE(gpu.ok());
  Divergences found;
  int accepted = 0;
  for (const std::vector<int32_t>& prompt : Prompts()) {
    const std::vector<Choice> plain = Plain(**gpu, prompt, {});
    const std::vector<Choice> trees = Speculated(**gpu, prompt, &accepted);
    for (int i = 0; i < kTokens; ++i) {
      found.Count(plain[i], trees[i]);
      if (plain[i].token != trees[i].token) break;  // what follows is another text
    }
  }
  found.Print("trees against plain decoding");
  std::printf("%d drafted tokens accepted\n", accepted);
  CHECK(accepted > 50);
  CHECK(found.largest_gap <= kTreeGap);
}

TEST_CASE("cuda: many sequences in a step, prompts and decoding mixed, near the CPU's values") {
  KDT_NEED_GPU();
  // How a step's shapes come about must not matter.
  const auto [mode, name] = GENERATE(table<StepMode, const char*>(
      {{StepMode::kExact, "exact"}, {StepMode::kEager, "padded"}, {StepMode::kAuto, "graphs"}}));
  const int sequences = GENERATE(3, 8);
  CAPTURE(name, sequences);
  std::vector<std::vector<double>> values(2);
  for (const bool gpu : {false, true}) {
    EngineOptions options = ShippedOptions(gpu ? kernels::DType::kBF16 : kernels::DType::kF32);
    options.max_rows = 1024;
    if (gpu) options.step_mode = mode;
    auto group = gpu ? EngineGroup::Start(options, 1, nullptr, MakeGpu) : EngineGroup::Start(options, 1);
    INFO(group.status());
    REQUIRE(group.ok());
    // The first half comes as whole prompts, the second while the first decodes; all along the same tokens.
    const auto token = [](int i, int64_t position) {
      return static_cast<int32_t>((97 * i + 31 * position * (i + 2)) % 3000 + 50);
    };
    std::vector<int64_t> length(sequences, 0);
    for (int step = 0; step < 12; ++step) {
      v1::StepRequest request;
      for (int i = 0; i < sequences; ++i) {
        if (step != (i % 2 == 0 ? 0 : 4)) continue;
        std::vector<int32_t> prompt;
        for (int64_t p = 0; p < 40 + 23 * i; ++p) prompt.push_back(token(i, p));
        AddCreate(&request, i + 1, Greedy(prompt.size()));
        v1::PrefillChunk* chunk = AddChunk(&request, i + 1, 0, prompt);
        chunk->set_sample(true);
        chunk->set_prompt_logprobs(1);
        chunk->set_draft_top_k(kDraftTop);
      }
      for (int i = 0; i < sequences; ++i) {
        if (length[i] == 0) continue;
        AddTree(&request, i + 1, static_cast<uint32_t>(length[i]), {token(i, length[i])}, {})
            ->set_draft_top_k(kDraftTop);
      }
      const auto response = (*group)->Step(request);
      INFO(response.status());
      REQUIRE(response.ok());
      for (const v1::SequenceResult& result : response->results()) {
        INFO(result.error());
        REQUIRE(result.error().empty());
        const auto i = static_cast<int>(result.sequence_id()) - 1;
        for (const auto& logprobs : result.prompt_logprobs())
          values[gpu].push_back(logprobs.top(0).logprob());
        for (const auto& logprobs : result.logprobs()) values[gpu].push_back(logprobs.top(0).logprob());
        length[i] += length[i] == 0 ? 40 + 23 * i : 1;
      }
    }
  }
  REQUIRE(values[0].size() == values[1].size());
  std::vector<double> errors;
  for (size_t i = 0; i < values[0].size(); ++i) errors.push_back(std::abs(values[0][i] - values[1][i]));
  const auto worst = std::max_element(errors.begin(), errors.end()) - errors.begin();
  const auto beyond = std::count_if(errors.begin(), errors.end(), [](double e) { return e > 0.25; });
  const auto first =
      std::find_if(errors.begin(), errors.end(), [](double e) { return e > 0.25; }) - errors.begin();
  const double largest = errors[worst];
  std::sort(errors.begin(), errors.end());
  std::printf(
      "%s, %d sequences: %zu values, median %.4f, largest %.4f (value %ld), %ld above 0.25, first %ld\n",
      name, sequences, errors.size(), errors[errors.size() / 2], largest, static_cast<long>(worst),
      static_cast<long>(beyond), static_cast<long>(first));
  CHECK(errors[errors.size() / 2] < 0.02);
  CHECK(static_cast<double>(beyond) <= 0.01 * static_cast<double>(errors.size()));
}

}  // namespace kdt::testing
