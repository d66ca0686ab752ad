// The drafter against the published DFlash code (tests/goldens): chain rounds, their draft logits, best
// tokens and what the target accepts.
#include <cmath>

#include "absl/strings/str_cat.h"
#include "tests/support/catch.h"
#include "tests/worker/support/engine_group.h"
#include "tests/worker/support/goldens.h"

namespace kdt::testing {
namespace {

constexpr double kLogitTolerance = 2e-3;
constexpr double kLogprobTolerance = 1e-3;
constexpr int kTop = 8;

class Recorder : public EngineObserver {
 public:
  void OnDraftLogits(const kernels::Tensor& tensor) override {
    logits.assign(tensor.f32(), tensor.f32() + tensor.rows * tensor.cols);
    columns = tensor.cols;
  }
  std::vector<float> logits;
  int64_t columns = 0;
};

void CheckDraft(const v1::DraftTopK& draft, const nlohmann::json& round, const Recorder& recorder,
                std::span<const float> reference) {
  const auto& top8 = round["top8"];
  REQUIRE(draft.k() == kTop);
  REQUIRE(draft.token_ids_size() == static_cast<int>(top8.size()) * kTop);
  for (size_t i = 0; i < top8.size(); ++i) {
    for (int k = 0; k < kTop; ++k) {
      const int at = static_cast<int>(i) * kTop + k;
      CHECK(draft.token_ids(at) == top8[i][k][0].get<uint32_t>());
      CHECK(std::abs(draft.log_probs(at) - top8[i][k][1].get<double>()) <= kLogprobTolerance);
    }
  }
  REQUIRE(recorder.logits.size() == top8.size() * recorder.columns);
  CHECK(LargestDistance(recorder.logits, recorder.columns, reference) <= kLogitTolerance);
}

}  // namespace

TEST_CASE("the drafter gives the reference's rounds") {
  const Goldens target = LoadGoldens("target");
  const Goldens goldens = LoadGoldens("drafter");
  const int tp = GENERATE(1, 2, 8);
  CAPTURE(tp);
  Recorder recorder;
  auto group = EngineGroup::Start(GoldenOptions(true), tp, &recorder);
  REQUIRE(group.ok());
  for (size_t p = 0; p < goldens.json.size(); ++p) {
    CAPTURE(p);
    const std::vector<int32_t> tokens = target.json["prompts"][p]["tokens"];
    v1::StepRequest request;
    v1::PrefillChunk* chunk =
        AddPrompt(&request, p + 1, GreedySampling(static_cast<uint32_t>(tokens.size())), tokens);
    chunk->set_draft_top_k(kTop);
    auto response = (*group)->Step(request);
    REQUIRE(response.ok());

    for (size_t r = 0; r < goldens.json[p].size(); ++r) {
      CAPTURE(r);
      const auto& round = goldens.json[p][r];
      const v1::SequenceResult& before = response->results(0);
      CHECK(before.tokens(before.tokens_size() - 1) == round["bonus"].get<uint32_t>());
      CheckDraft(before.draft(), round, recorder,
                 goldens.Values(absl::StrCat("p", p, ".r", r, ".draft_logits")));

      const GoldenChain chain = ChainOf(round);
      v1::StepRequest verify;
      AddTree(&verify, p + 1, round["start"].get<uint32_t>(), chain.tokens, chain.parents)
          ->set_draft_top_k(kTop);
      response = (*group)->Step(verify);
      REQUIRE(response.ok());
      const v1::SequenceResult& after = response->results(0);
      CHECK(after.accepted_nodes_size() == round["accepted"].get<int>());
      CHECK(after.tokens(after.tokens_size() - 1) == round["next_bonus"].get<uint32_t>());
    }
  }
}

}  // namespace kdt::testing
