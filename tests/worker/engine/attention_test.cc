// --attention on the CPU, where the reference is the ordinary op: which steps and values are compared, and
// that no mode changes an answer.
#include "common/model_config.h"
#include "tests/support/catch.h"
#include "tests/worker/support/engine_group.h"

namespace kdt::testing {
namespace {

constexpr int kTp = 2;
constexpr int kTreeSteps = 5;  // behind the prompt's

// A prompt of six tokens, then trees of three nodes; the answers as bytes.
std::string Run(EngineGroup& group) {
  v1::StepRequest prompt;
  AddCreate(&prompt, 1, GreedySampling(6));
  AddChunk(&prompt, 1, 0, {5, 80, 91, 337, 269, 12})->set_sample(true);
  auto response = group.Step(prompt);
  REQUIRE(response.ok());
  std::string answers;
  uint32_t position = 6;
  for (int i = 0; i < kTreeSteps; ++i) {
    const v1::SequenceResult& result = response->results(0);
    answers += result.SerializeAsString();
    const int kept = result.tokens_size();
    v1::StepRequest request;
    AddTree(&request, 1, position, {static_cast<int32_t>(result.tokens(kept - 1)), 7, 9}, {0, 0});
    response = group.Step(request);
    REQUIRE(response.ok());
    position += static_cast<uint32_t>(response->results(0).tokens_size());
  }
  return answers;
}

}  // namespace

TEST_CASE("validate compares every value of the sampled steps and changes none") {
  EngineOptions options = GoldenOptions(false);
  const auto fast = EngineGroup::Start(options, kTp);
  REQUIRE(fast.ok());
  const std::string answers = Run(**fast);
  CHECK((*fast)->engine(0).stats().attention.values == 0);

  options.attention = AttentionMode::kReference;
  const auto reference = EngineGroup::Start(options, kTp);
  REQUIRE(reference.ok());
  CHECK(Run(**reference) == answers);
  CHECK((*reference)->engine(0).stats().attention.values == 0);

  options.attention = AttentionMode::kValidate;
  options.validate_every = 2;
  const auto validate = EngineGroup::Start(options, kTp);
  REQUIRE(validate.ok());
  CHECK(Run(**validate) == answers);
  const auto config = ModelConfig::Load(options.model_dir);
  REQUIRE(config.ok());
  // Steps 2, 4 and 6, of three rows each.
  const int64_t values =
      3 * 3 * config->num_hidden_layers * config->num_attention_heads / kTp * config->kv_lora_rank;
  for (int rank = 0; rank < kTp; ++rank) {
    const AttentionErrors errors = (*validate)->engine(rank).stats().attention;
    CHECK(errors.values == static_cast<uint64_t>(values));
    CHECK(errors.beyond_ulp == 0);
    CHECK(errors.beyond_row_ulp == 0);
    CHECK(errors.largest_ulps <= 0.5F);  // float32 against the reference rounded to bf16
  }
}

}  // namespace kdt::testing
