// The target against transformers' DeepseekV3ForCausalLM (tests/goldens): logits, hidden states,
// log-probabilities and greedy tokens, at every tensor-parallel size.
#include <cmath>
#include <map>

#include "absl/strings/str_cat.h"
#include "tests/support/catch.h"
#include "tests/worker/support/engine_group.h"
#include "tests/worker/support/goldens.h"

namespace kdt::testing {
namespace {

constexpr double kLogitTolerance = 2e-3;
constexpr double kHiddenTolerance = 1e-4;  // relative to the row's norm
constexpr double kLogprobTolerance = 1e-3;
constexpr int kTop = 5;

// Keeps what rank 0 sees of the last step.
class Recorder : public EngineObserver {
 public:
  void OnLayerOutput(int64_t layer, const kernels::Tensor& residual) override {
    layers[layer].assign(residual.f32(), residual.f32() + residual.rows * residual.cols);
  }
  void OnLogits(const kernels::Tensor& tensor) override {
    logits.assign(tensor.f32(), tensor.f32() + tensor.rows * tensor.cols);
    columns = tensor.cols;
  }
  std::map<int64_t, std::vector<float>> layers;
  std::vector<float> logits;
  int64_t columns = 0;
};

void CheckHidden(const std::vector<float>& ours, std::span<const float> reference, int64_t hidden) {
  REQUIRE(ours.size() == reference.size());
  for (size_t row = 0; row < reference.size(); row += hidden) {
    double norm = 0;
    double difference = 0;
    for (size_t i = row; i < row + hidden; ++i) {
      norm += std::pow(reference[i], 2);
      difference += std::pow(static_cast<double>(ours[i]) - reference[i], 2);
    }
    CHECK(std::sqrt(difference) <= kHiddenTolerance * std::sqrt(norm));
  }
}

}  // namespace

TEST_CASE("the target gives the reference's values") {
  const Goldens goldens = LoadGoldens("target");
  const int tp = GENERATE(1, 2, 4, 8);
  const bool whole_experts = GENERATE(false, true);
  CAPTURE(tp, whole_experts);
  Recorder recorder;
  EngineOptions options = GoldenOptions(false);
  if (whole_experts) options.moe_sharding = MoeSharding::kExpert;
  auto group = EngineGroup::Start(options, tp, &recorder);
  REQUIRE(group.ok());
  for (size_t p = 0; p < goldens.json["prompts"].size(); ++p) {
    CAPTURE(p);
    const auto& prompt = goldens.json["prompts"][p];
    const std::vector<int32_t> tokens = prompt["tokens"];
    const std::vector<int32_t> greedy = prompt["greedy"];
    const std::string name = absl::StrCat("p", p);

    v1::SamplingState sampling = GreedySampling(static_cast<uint32_t>(tokens.size()));
    sampling.set_logprobs(kTop);
    v1::StepRequest request;
    v1::PrefillChunk* chunk = AddPrompt(&request, p + 1, sampling, tokens);
    chunk->set_prompt_logprobs(kTop);
    auto response = (*group)->Step(request);
    REQUIRE(response.ok());

    // Rank 0's part of the vocabulary, at every position.
    const auto logits = goldens.Values(name + ".logits");
    const int64_t vocab = static_cast<int64_t>(logits.size() / tokens.size());
    REQUIRE(recorder.columns == vocab / tp);
    REQUIRE(recorder.logits.size() == tokens.size() * recorder.columns);
    CHECK(LargestDistance(recorder.logits, recorder.columns, logits) <= kLogitTolerance);
    for (int64_t layer = 0; layer < 3; ++layer) {
      const std::string hidden = absl::StrCat(name, ".hidden.", layer);
      if (!goldens.tensors->Find(hidden).ok()) continue;
      CAPTURE(layer);
      CheckHidden(recorder.layers[layer - 1], goldens.Values(hidden), 128);
    }

    REQUIRE(response->results_size() == 1);
    const v1::SequenceResult& result = response->results(0);
    REQUIRE(result.prompt_logprobs_size() == static_cast<int>(tokens.size()) - 1);
    const auto check_top = [&](const v1::PositionLogprobs& ours, const nlohmann::json& reference) {
      REQUIRE(ours.top_size() == kTop);
      for (int k = 0; k < kTop; ++k) {
        CHECK(ours.top(k).token_id() == reference[k][0].get<uint32_t>());
        CHECK(std::abs(ours.top(k).logprob() - reference[k][1].get<double>()) <= kLogprobTolerance);
      }
    };
    for (size_t i = 1; i < tokens.size(); ++i) {
      const v1::PositionLogprobs& ours = result.prompt_logprobs(static_cast<int>(i) - 1);
      CHECK(ours.token().token_id() == static_cast<uint32_t>(tokens[i]));
      CHECK(std::abs(ours.token().logprob() - prompt["token_logprobs"][i].get<double>()) <=
            kLogprobTolerance);
      check_top(ours, prompt["top5"][i - 1]);
    }
    check_top(result.logprobs(0), prompt["top5"][tokens.size() - 1]);

    // Plain decoding: a tree of a root alone each step.
    std::vector<int32_t> drawn = {static_cast<int32_t>(result.tokens(0))};
    while (drawn.size() < greedy.size()) {
      v1::StepRequest decode;
      AddTree(&decode, p + 1, static_cast<uint32_t>(tokens.size() + drawn.size() - 1), {drawn.back()}, {});
      response = (*group)->Step(decode);
      REQUIRE(response.ok());
      drawn.push_back(static_cast<int32_t>(response->results(0).tokens(0)));
    }
    CHECK(drawn == greedy);
  }
}

}  // namespace kdt::testing
