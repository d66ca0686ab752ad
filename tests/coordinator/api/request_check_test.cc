// Every field of a request: what is refused, under which name, and what unset fields become.
#include "coordinator/api/request_check.h"

#include <limits>

#include "coordinator/tokenizer/stop_matcher.h"
#include "tests/support/catch.h"

namespace kdt::testing {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
const RequestLimits kLimits{.max_context = 256, .max_samples = 32, .max_budget = 64};

const ServedModel& Model() {
  static const ServedModel* model = [] {
    auto* served = new ServedModel;
    const std::string folder = KDT_GOLDENS_DIR "/model";
    served->name = "golden";
    served->config = *ModelConfig::Load(folder);
    served->tokenizer = *Tokenizer::Load(folder);
    served->chat.emplace(*ChatRenderer::Create(served->tokenizer));
    return served;
  }();
  return *model;
}

v1::GenerateRequest Valid() {
  v1::GenerateRequest request;
  for (const uint32_t id : {1, 2, 3}) request.mutable_token_ids()->add_ids(id);
  return request;
}

struct BadCase {
  const char* field;
  void (*spoil)(v1::GenerateRequest*);
};

const BadCase kBadCases[] = {
    {"request_id", [](auto* r) { r->set_request_id(std::string(257, 'x')); }},
    {"prompt", [](auto* r) { r->clear_prompt(); }},
    {"prompt", [](auto* r) { r->mutable_text(); }},
    {"prompt", [](auto* r) { r->mutable_token_ids()->clear_ids(); }},
    {"prompt", [](auto* r) { r->mutable_token_ids()->mutable_ids()->Resize(256, 1); }},
    {"token_ids.ids[3]", [](auto* r) { r->mutable_token_ids()->add_ids(1024); }},
    {"token_ids.ids[3]", [](auto* r) { r->mutable_token_ids()->add_ids(UINT32_MAX); }},
    {"chat.messages", [](auto* r) { r->mutable_chat(); }},
    {"chat.messages[0].role", [](auto* r) { r->mutable_chat()->add_messages()->set_role("king"); }},
    {"sampling.temperature", [](auto* r) { r->mutable_sampling()->set_temperature(-1); }},
    {"sampling.temperature", [](auto* r) { r->mutable_sampling()->set_temperature(kNaN); }},
    {"sampling.temperature", [](auto* r) { r->mutable_sampling()->set_temperature(kInfinity); }},
    {"sampling.temperature", [](auto* r) { r->mutable_sampling()->set_temperature(1e-30F); }},
    {"sampling.top_p", [](auto* r) { r->mutable_sampling()->set_top_p(0); }},
    {"sampling.top_p", [](auto* r) { r->mutable_sampling()->set_top_p(1.01F); }},
    {"sampling.top_p", [](auto* r) { r->mutable_sampling()->set_top_p(kNaN); }},
    {"sampling.top_k", [](auto* r) { r->mutable_sampling()->set_top_k(-1); }},
    {"sampling.min_p", [](auto* r) { r->mutable_sampling()->set_min_p(1.5F); }},
    {"sampling.min_p", [](auto* r) { r->mutable_sampling()->set_min_p(kNaN); }},
    {"sampling.repetition_penalty", [](auto* r) { r->mutable_sampling()->set_repetition_penalty(0); }},
    {"sampling.repetition_penalty", [](auto* r) { r->mutable_sampling()->set_repetition_penalty(kNaN); }},
    {"sampling.frequency_penalty", [](auto* r) { r->mutable_sampling()->set_frequency_penalty(kInfinity); }},
    {"sampling.presence_penalty", [](auto* r) { r->mutable_sampling()->set_presence_penalty(kNaN); }},
    {"sampling.logit_bias", [](auto* r) { (*r->mutable_sampling()->mutable_logit_bias())[1024] = 1; }},
    {"sampling.logit_bias", [](auto* r) { (*r->mutable_sampling()->mutable_logit_bias())[5] = kNaN; }},
    {"sampling.logit_bias", [](auto* r) { (*r->mutable_sampling()->mutable_logit_bias())[5] = -kInfinity; }},
    {"sampling.n", [](auto* r) { r->mutable_sampling()->set_n(0); }},
    {"sampling.n", [](auto* r) { r->mutable_sampling()->set_n(33); }},
    {"stop.max_tokens", [](auto* r) { r->mutable_stop()->set_max_tokens(0); }},
    {"stop.min_tokens", [](auto* r) { r->mutable_stop()->set_min_tokens(254); }},
    {"stop.stop_token_ids", [](auto* r) { r->mutable_stop()->add_stop_token_ids(1024); }},
    {"stop.stop_token_ids", [](auto* r) { r->mutable_stop()->mutable_stop_token_ids()->Resize(65, 1); }},
    {"stop.stop[1]",
     [](auto* r) {
       r->mutable_stop()->add_stop("stop");
       r->mutable_stop()->add_stop();
     }},
    {"stop.stop",
     [](auto* r) {
       for (int i = 0; i < 65; ++i) r->mutable_stop()->add_stop("stop");
     }},
    {"output.logprobs", [](auto* r) { r->mutable_output()->set_logprobs(21); }},
    {"output.prompt_logprobs", [](auto* r) { r->mutable_output()->set_prompt_logprobs(21); }},
    {"speculation.budget", [](auto* r) { r->mutable_speculation()->set_budget(65); }},
    {"speculation.mode",
     [](auto* r) { r->mutable_speculation()->set_mode(static_cast<v1::SpeculationParams::Mode>(9)); }},
};

}  // namespace

TEST_CASE("every bad field is refused by its name") {
  REQUIRE(CheckRequest(Valid(), Model(), kLimits).ok());
  for (const BadCase& bad : kBadCases) {
    v1::GenerateRequest request = Valid();
    bad.spoil(&request);
    const absl::Status status = CheckRequest(request, Model(), kLimits).status();
    INFO(bad.field << " -> " << status.ToString());
    CHECK(absl::IsInvalidArgument(status));
    CHECK(std::string(status.message()).rfind(bad.field, 0) == 0);
  }
}

TEST_CASE("unset fields take their defaults") {
  const auto spec = CheckRequest(Valid(), Model(), kLimits);
  REQUIRE(spec.ok());
  CHECK_FALSE(spec->request_id.empty());
  CHECK(spec->n == 1);
  CHECK(spec->max_tokens == 256 - 3);
  CHECK(spec->sampling.temperature() == 1.0F);
  CHECK(spec->sampling.top_p() == 1.0F);
  CHECK(spec->sampling.top_k() == 0);
  CHECK(spec->sampling.min_p() == 0.0F);
  CHECK(spec->sampling.repetition_penalty() == 1.0F);
  CHECK(spec->sampling.prompt_length() == 3);
  REQUIRE(spec->sampling.stop_token_ids_size() == 1);
  CHECK(spec->sampling.stop_token_ids(0) == 770);  // the golden model's end token
  CHECK(spec->stops == nullptr);
  // Drawn seeds differ.
  CHECK(spec->sampling.seed() != CheckRequest(Valid(), Model(), kLimits)->sampling.seed());
}

TEST_CASE("the temperatures that the api names as its ends are taken") {
  for (const float temperature : {0.0F, 0.0001F, 100.0F}) {
    v1::GenerateRequest request = Valid();
    request.mutable_sampling()->set_temperature(temperature);
    const auto spec = CheckRequest(request, Model(), kLimits);
    INFO(spec.status().ToString());
    REQUIRE(spec.ok());
    CHECK(spec->sampling.temperature() == temperature);
  }
}

TEST_CASE("the checkpoint's generation defaults stand in for unset fields, and the request goes first") {
  ServedModel model = Model();
  model.config.sampling.temperature = 0.6;
  model.config.sampling.top_p = 0.9;
  model.config.sampling.top_k = 40;
  model.config.sampling.max_new_tokens = 17;
  v1::GenerateRequest request = Valid();
  request.mutable_sampling()->set_top_p(0.5F);
  const auto spec = CheckRequest(request, model, kLimits);
  REQUIRE(spec.ok());
  CHECK(spec->sampling.temperature() == 0.6F);
  CHECK(spec->sampling.top_p() == 0.5F);
  CHECK(spec->sampling.top_k() == 40);
  CHECK(spec->max_tokens == 17);
}

TEST_CASE("stops, samples and speculation are taken over") {
  v1::GenerateRequest request = Valid();
  request.mutable_stop()->set_ignore_eos(true);
  request.mutable_stop()->add_stop_token_ids(9);
  request.mutable_stop()->add_stop_token_ids(9);
  request.mutable_stop()->add_stop("end");
  request.mutable_stop()->set_max_tokens(100000);  // no more than the context
  request.mutable_sampling()->set_seed(3);
  request.mutable_sampling()->set_n(4);
  request.mutable_speculation()->set_mode(v1::SpeculationParams::CHAIN);
  request.mutable_speculation()->set_budget(64);
  const auto spec = CheckRequest(request, Model(), kLimits);
  REQUIRE(spec.ok());
  CHECK(spec->sampling.stop_token_ids_size() == 1);
  CHECK(spec->max_tokens == 253);
  CHECK(spec->sampling.seed() == 3);
  CHECK(spec->n == 4);
  REQUIRE(spec->stops != nullptr);
  CHECK(spec->stops->strings().size() == 1);
  CHECK(spec->mode == SpeculationMode::kChain);
  CHECK(spec->budget == 64u);
}

TEST_CASE("a chat becomes the rendered prompt") {
  v1::GenerateRequest request;
  auto* message = request.mutable_chat()->add_messages();
  message->set_role("user");
  message->set_content("hi");
  const auto spec = CheckRequest(request, Model(), kLimits);
  REQUIRE(spec.ok());
  CHECK(spec->chat);
  CHECK(spec->reasoning_open);
  CHECK(spec->prompt == Model().chat->Render(request.chat(), true)->ids);
}

}  // namespace kdt::testing
