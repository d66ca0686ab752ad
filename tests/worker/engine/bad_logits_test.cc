// Logits that are not numbers fail their own sequence, are said so, and touch no other.
#include "tests/support/catch.h"
#include "tests/worker/support/checkpoint_copy.h"
#include "tests/worker/support/engine_group.h"

namespace kdt::testing {
namespace {

constexpr int32_t kPoisoned = 500;  // its embedding holds a NaN
constexpr uint16_t kNanBits = 0x7fc0;
constexpr int64_t kHidden = 128;

}  // namespace

TEST_CASE("a NaN fails its sequence alone") {
  const int tp = GENERATE(1, 2);
  CAPTURE(tp);
  CheckpointCopy copy;
  CheckpointCopy::SetBf16(copy.model() + "/model-00001-of-00002.safetensors",
                          "language_model.model.embed_tokens.weight", kPoisoned * kHidden + 3, kNanBits);
  EngineOptions options = GoldenOptions(true);
  options.model_dir = copy.model();
  auto started = EngineGroup::Start(options, tp);
  REQUIRE(started.ok());
  EngineGroup& group = **started;

  v1::StepRequest request;
  v1::SamplingState sampling = GreedySampling(3);
  sampling.set_logprobs(2);
  AddCreate(&request, 1, sampling);
  AddChunk(&request, 1, 0, {1, 2, 3})->set_sample(true);
  auto response = group.Step(request);
  REQUIRE(response.ok());
  const std::string alone = response->results(0).SerializeAsString();
  const auto root = static_cast<int32_t>(response->results(0).tokens(0));

  SECTION("in a prompt") {
    v1::StepRequest both;
    AddCreate(&both, 2, sampling);
    AddCreate(&both, 3, sampling);
    AddChunk(&both, 2, 0, {1, kPoisoned, 3})->set_sample(true);
    AddChunk(&both, 3, 0, {1, 2, 3})->set_sample(true);
    response = group.Step(both);
    REQUIRE(response.ok());
    REQUIRE(response->results_size() == 2);
    CHECK(response->results(0).error().find("not finite") != std::string::npos);
    CHECK(response->results(0).tokens_size() == 0);
    v1::SequenceResult other = response->results(1);
    CHECK(other.sequence_id() == 3);
    other.set_sequence_id(1);
    CHECK(other.SerializeAsString() == alone);
    CHECK(response->pool().slots_used() == 6);  // of sequences 1 and 3

    // The failed sequence stays as it was and may be freed.
    v1::StepRequest free;
    AddFree(&free, 2);
    CHECK(group.Step(free).ok());
  }
  SECTION("in a tree, beside the path") {
    v1::StepRequest plain;
    AddFork(&plain, 4, 1, 3, sampling);
    AddTree(&plain, 4, 3, {root}, {});
    response = group.Step(plain);
    REQUIRE(response.ok());
    const v1::SequenceResult expected = response->results(0);

    v1::StepRequest verify;
    AddTree(&verify, 1, 3, {root, kPoisoned}, {0});
    response = group.Step(verify);
    REQUIRE(response.ok());
    CHECK(response->results(0).error().empty());
    CHECK(response->results(0).tokens(0) == expected.tokens(0));
    CHECK(response->results(0).logprobs(0).SerializeAsString() == expected.logprobs(0).SerializeAsString());
  }
  SECTION("in a tree's root") {
    v1::StepRequest verify;
    AddTree(&verify, 1, 3, {kPoisoned, root}, {0});
    response = group.Step(verify);
    REQUIRE(response.ok());
    CHECK(!response->results(0).error().empty());
    CHECK(response->pool().slots_used() == 3);
    // Its slots are used again by rows that are sound.
    v1::StepRequest again;
    AddTree(&again, 1, 3, {root, 7}, {0});
    response = group.Step(again);
    REQUIRE(response.ok());
    CHECK(response->results(0).error().empty());
  }
}

}  // namespace kdt::testing
