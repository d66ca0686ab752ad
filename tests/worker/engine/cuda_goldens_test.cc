// The CUDA engine against the float32 references of tests/goldens.
//
// Tolerances: activations and KV rows are bf16, a relative error of 2^-9 a rounding. A row goes through about
// a dozen roundings a layer, which comes to one hundredth of its residual stream a layer and to a tenth
// in the worst of the best five log-probabilities. Where two experts score almost the same the rounding
// decides between them, and in a model of random weights the other expert gives another row altogether: such
// rows are counted.
#include <algorithm>
#include <cmath>
#include <map>

#include "absl/strings/str_cat.h"
#include "common/bf16.h"
#include "tests/worker/engine/cuda_group.h"
#include "tests/worker/support/goldens.h"

namespace kdt::testing {
namespace {

constexpr double kMedianTolerance = 0.15;  // of log-probabilities
constexpr double kRowTolerance = 0.5;
constexpr double kLayerTolerance = 0.015;  // relative, a layer
constexpr double kClearGap = 0.25;
constexpr double kRerouted = 0.1;  // share of the rows
constexpr int kTop = 5;

double Gap(const nlohmann::json& top) { return top[0][1].get<double>() - top[1][1].get<double>(); }

void CheckErrors(const std::string& what, std::vector<double> errors) {
  std::sort(errors.begin(), errors.end());
  const auto beyond = errors.end() - std::upper_bound(errors.begin(), errors.end(), kRowTolerance);
  const double median = errors[errors.size() / 2];
  std::printf("%s: %zu errors, median %.4f, largest %.4f, %ld above %.2f\n", what.c_str(), errors.size(),
              median, errors.back(), static_cast<long>(beyond), kRowTolerance);
  CHECK(median <= kMedianTolerance);
  CHECK(static_cast<double>(beyond) <= kRerouted * static_cast<double>(errors.size()));
}

}  // namespace

TEST_CASE("cuda: the target gives the reference's log-probabilities and tokens") {
  KDT_NEED_GPU();
  const Goldens goldens = LoadGoldens("target");
  const int tp = GENERATE(1, 2, 4);
  const bool whole_experts = GENERATE(false, true);
  CAPTURE(tp, whole_experts);
  EngineOptions options = CudaOptions(false);
  if (whole_experts) options.moe_sharding = MoeSharding::kExpert;
  auto group = EngineGroup::Start(options, tp, nullptr, MakeGpu);
  INFO(group.status());
  REQUIRE(group.ok());
  std::vector<double> errors;
  int flips = 0;
  for (size_t p = 0; p < goldens.json["prompts"].size(); ++p) {
    CAPTURE(p);
    const auto& prompt = goldens.json["prompts"][p];
    const std::vector<int32_t> tokens = prompt["tokens"];
    const std::vector<int32_t> greedy = prompt["greedy"];
    v1::SamplingState sampling = GreedySampling(static_cast<uint32_t>(tokens.size()));
    sampling.set_logprobs(kTop);
    v1::StepRequest request;
    v1::PrefillChunk* chunk = AddPrompt(&request, p + 1, sampling, tokens);
    chunk->set_prompt_logprobs(kTop);
    auto response = (*group)->Step(request);
    INFO(response.status());
    REQUIRE(response.ok());
    REQUIRE(response->results_size() == 1);
    const v1::SequenceResult& result = response->results(0);
    REQUIRE(result.prompt_logprobs_size() == static_cast<int>(tokens.size()) - 1);
    for (size_t i = 1; i < tokens.size(); ++i) {
      const v1::PositionLogprobs& ours = result.prompt_logprobs(static_cast<int>(i) - 1);
      CHECK(ours.token().token_id() == static_cast<uint32_t>(tokens[i]));
      const auto& reference = prompt["top5"][i - 1];
      double worst = 0;
      for (int k = 0; k < kTop; ++k) {
        worst = std::max(worst, std::abs(ours.top(k).logprob() - reference[k][1].get<double>()));
      }
      errors.push_back(worst);
      flips +=
          Gap(reference) > kClearGap && ours.top(0).token_id() != reference[0][0].get<uint32_t>() ? 1 : 0;
    }

    // Plain decoding along the reference's tokens.
    std::vector<int32_t> drawn = {static_cast<int32_t>(result.tokens(0))};
    const auto& gaps = prompt["top1_minus_top2"];
    for (size_t i = 0;; ++i) {
      CAPTURE(i);
      flips += gaps[i].get<double>() > kClearGap && drawn[i] != greedy[i] ? 1 : 0;
      if (i + 1 == greedy.size()) break;
      v1::StepRequest decode;
      AddTree(&decode, p + 1, static_cast<uint32_t>(tokens.size() + i), {greedy[i]}, {});
      response = (*group)->Step(decode);
      INFO(response.status());
      REQUIRE(response.ok());
      drawn.push_back(static_cast<int32_t>(response->results(0).tokens(0)));
    }
  }
  CheckErrors(absl::StrCat("tp ", tp, ", best five"), errors);
  std::printf("  %d clear tokens differ\n", flips);
  CHECK(flips <= kRerouted * static_cast<double>(errors.size()));
}

TEST_CASE("cuda: rows leave the CPU's values only behind a router that chose other experts") {
  KDT_NEED_GPU();
  // A row's residual stream behind each layer, as float32.
  class Recorder : public EngineObserver {
   public:
    explicit Recorder(kernels::Backend** backend) : backend_(backend) {}
    void OnLayerOutput(int64_t layer, const kernels::Tensor& x) override {
      std::vector<float>& values = layers[layer];
      values.resize(x.rows * x.cols);
      columns = x.cols;
      if (x.dtype == kernels::DType::kF32) {
        std::copy_n(x.f32(), values.size(), values.begin());
        return;
      }
      std::vector<uint16_t> bits(values.size());
      REQUIRE((*backend_)->Download(bits.data(), x.data, bits.size() * sizeof(uint16_t)).ok());
      for (size_t i = 0; i < bits.size(); ++i) values[i] = Bf16ToFloat(bits[i]);
    }
    std::map<int64_t, std::vector<float>> layers;
    int64_t columns = 0;

   private:
    kernels::Backend** backend_;
  };
  const Goldens goldens = LoadGoldens("target");
  kernels::Backend* gpu = nullptr;
  Recorder on_cpu(nullptr), on_gpu(&gpu);
  auto cpu_group = EngineGroup::Start(GoldenOptions(false), 1, &on_cpu);
  auto gpu_group = EngineGroup::Start(CudaOptions(false), 1, &on_gpu, MakeGpu);
  REQUIRE(cpu_group.ok());
  REQUIRE(gpu_group.ok());
  gpu = &(*gpu_group)->backend(0);
  for (size_t p = 0; p < goldens.json["prompts"].size(); ++p) {
    const std::vector<int32_t> tokens = goldens.json["prompts"][p]["tokens"];
    v1::StepRequest request;
    AddCreate(&request, p + 1, GreedySampling(static_cast<uint32_t>(tokens.size())));
    AddChunk(&request, p + 1, 0, tokens)->set_sample(true);
    REQUIRE((*cpu_group)->Step(request).ok());
    REQUIRE((*gpu_group)->Step(request).ok());
    for (auto& [layer, expected] : on_cpu.layers) {
      const std::vector<float>& got = on_gpu.layers[layer];
      const size_t columns = on_cpu.columns;
      std::vector<double> errors;
      for (size_t row = 0; row < tokens.size(); ++row) {
        double norm = 0, difference = 0;
        for (size_t i = row * columns; i < (row + 1) * columns; ++i) {
          norm += std::pow(expected[i], 2);
          difference += std::pow(static_cast<double>(got[i]) - expected[i], 2);
        }
        errors.push_back(std::sqrt(difference / norm));
      }
      std::sort(errors.begin(), errors.end());
      std::printf("prompt %zu layer %2ld: median %.5f, 90%% %.5f, largest %.5f\n", p,
                  static_cast<long>(layer), errors[errors.size() / 2], errors[errors.size() * 9 / 10],
                  errors.back());
      // The first layer is dense: there every row is near.
      CHECK((layer > 0 ? errors[errors.size() / 2] : errors.back()) <
            kLayerTolerance * static_cast<double>(layer + 2));
    }
  }
}

TEST_CASE("cuda: the drafter gives the reference's rounds") {
  KDT_NEED_GPU();
  constexpr int kDraftTop = 8;
  const Goldens target = LoadGoldens("target");
  const Goldens goldens = LoadGoldens("drafter");
  const int tp = GENERATE(1, 2, 4);
  CAPTURE(tp);
  auto group = EngineGroup::Start(CudaOptions(true), tp, nullptr, MakeGpu);
  INFO(group.status());
  REQUIRE(group.ok());
  std::vector<double> errors;
  for (size_t p = 0; p < goldens.json.size(); ++p) {
    CAPTURE(p);
    const std::vector<int32_t> tokens = target.json["prompts"][p]["tokens"];
    v1::StepRequest request;
    v1::PrefillChunk* chunk =
        AddPrompt(&request, p + 1, GreedySampling(static_cast<uint32_t>(tokens.size())), tokens);
    chunk->set_draft_top_k(kDraftTop);
    auto response = (*group)->Step(request);
    for (size_t r = 0; r < goldens.json[p].size(); ++r) {
      CAPTURE(r);
      INFO(response.status());
      REQUIRE(response.ok());
      const auto& round = goldens.json[p][r];
      const v1::SequenceResult& before = response->results(0);
      // A token that fell the other way in a near tie ends what can be compared.
      if (before.tokens(before.tokens_size() - 1) != round["bonus"].get<uint32_t>()) break;
      const v1::DraftTopK& draft = before.draft();
      const auto& top8 = round["top8"];
      REQUIRE(draft.token_ids_size() == static_cast<int>(top8.size()) * kDraftTop);
      for (size_t i = 0; i < top8.size(); ++i) {
        for (int k = 0; k < kDraftTop; ++k) {
          const int at = static_cast<int>(i) * kDraftTop + k;
          errors.push_back(std::abs(draft.log_probs(at) - top8[i][k][1].get<double>()));
        }
      }
      const GoldenChain chain = ChainOf(round);
      v1::StepRequest verify;
      AddTree(&verify, p + 1, round["start"].get<uint32_t>(), chain.tokens, chain.parents)
          ->set_draft_top_k(kDraftTop);
      response = (*group)->Step(verify);
    }
  }
  CheckErrors(absl::StrCat("tp ", tp, ", drafts"), errors);
}

}  // namespace kdt::testing
