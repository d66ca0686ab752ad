#include "coordinator/api/request_check.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/status.h"
#include "coordinator/tokenizer/stop_matcher.h"

namespace kdt {
namespace {

constexpr double kMinTemperature = 1e-4F;  // below it logits / T leave float32; 0 is greedy
constexpr double kMaxTemperature = 100;
constexpr double kMaxPenalty = 100;
constexpr double kMaxBias = 1e4;

template <typename... Parts>
absl::Status Bad(const char* field, const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": ", parts...));
}

uint64_t Draw64() {
  thread_local std::mt19937_64 generator = [] {
    std::random_device device;
    std::seed_seq seeds{device(), device(), device(), device()};
    return std::mt19937_64(seeds);
  }();
  return generator();
}

// NaN fails every comparison and so every range.
absl::Status CheckRange(const char* field, double value, double min, double max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return Bad(field, value, " is not in [", min, ", ", max, "]");
}

absl::Status ResolveSampling(const v1::SamplingParams& in, const ModelConfig& config,
                             v1::SamplingState* out) {
  const SamplingDefaults& defaults = config.sampling;
  const double temperature = in.has_temperature() ? in.temperature() : defaults.temperature.value_or(1.0);
  KDT_RETURN_IF_ERROR(CheckRange("sampling.temperature", temperature, 0, kMaxTemperature));
  if (temperature != 0 && temperature < kMinTemperature) {
    return Bad("sampling.temperature", temperature, " is neither 0 nor at least ", kMinTemperature);
  }
  const double top_p = in.has_top_p() ? in.top_p() : defaults.top_p.value_or(1.0);
  if (!(top_p > 0 && top_p <= 1)) return Bad("sampling.top_p", top_p, " is not in (0, 1]");
  const int64_t top_k = in.has_top_k() ? in.top_k() : defaults.top_k.value_or(0);
  if (top_k < 0) return Bad("sampling.top_k", top_k, " is negative (0: off)");
  const double min_p = in.has_min_p() ? in.min_p() : defaults.min_p.value_or(0.0);
  KDT_RETURN_IF_ERROR(CheckRange("sampling.min_p", min_p, 0, 1));
  const double repetition =
      in.has_repetition_penalty() ? in.repetition_penalty() : defaults.repetition_penalty.value_or(1.0);
  if (!(repetition > 0 && repetition <= kMaxPenalty)) {
    return Bad("sampling.repetition_penalty", repetition, " is not in (0, ", kMaxPenalty, "]");
  }
  KDT_RETURN_IF_ERROR(
      CheckRange("sampling.frequency_penalty", in.frequency_penalty(), -kMaxPenalty, kMaxPenalty));
  KDT_RETURN_IF_ERROR(
      CheckRange("sampling.presence_penalty", in.presence_penalty(), -kMaxPenalty, kMaxPenalty));
  if (in.logit_bias().size() > kMaxLogitBias) {
    return Bad("sampling.logit_bias", in.logit_bias().size(), " entries, the most is ", kMaxLogitBias);
  }
  for (const auto& [id, bias] : in.logit_bias()) {
    if (id >= config.vocab_size) {
      return Bad("sampling.logit_bias", "token id ", id, " is not below the vocabulary's ",
                 config.vocab_size);
    }
    if (!(std::abs(bias) <= kMaxBias)) {
      return Bad("sampling.logit_bias", bias, " of token ", id, " is not in [-", kMaxBias, ", ", kMaxBias,
                 "]");
    }
    (*out->mutable_logit_bias())[id] = bias;
  }
  out->set_temperature(static_cast<float>(temperature));
  out->set_top_p(static_cast<float>(top_p));
  out->set_top_k(static_cast<uint32_t>(std::min<int64_t>(top_k, config.vocab_size)));
  out->set_min_p(static_cast<float>(min_p));
  out->set_repetition_penalty(static_cast<float>(repetition));
  out->set_frequency_penalty(in.frequency_penalty());
  out->set_presence_penalty(in.presence_penalty());
  out->set_seed(in.has_seed() ? in.seed() : Draw64());
  return absl::OkStatus();
}

absl::Status ResolvePrompt(const v1::GenerateRequest& request, const ServedModel& model, RequestSpec* spec) {
  switch (request.prompt_case()) {
    case v1::GenerateRequest::kText: {
      auto ids = model.tokenizer->Encode(request.text(), request.parse_special());
      if (!ids.ok()) return Bad("text", ids.status().message());
      spec->prompt = *std::move(ids);
      break;
    }
    case v1::GenerateRequest::kTokenIds: {
      const auto& ids = request.token_ids().ids();
      for (int i = 0; i < ids.size(); ++i) {
        if (ids[i] >= model.config.vocab_size) {
          return absl::InvalidArgumentError(absl::StrCat("token_ids.ids[", i, "]: ", ids[i],
                                                         " is not below the vocabulary's ",
                                                         model.config.vocab_size));
        }
      }
      spec->prompt.assign(ids.begin(), ids.end());
      break;
    }
    case v1::GenerateRequest::kChat: {
      if (!model.chat.has_value())
        return absl::FailedPreconditionError("chat: this model has no chat format");
      KDT_ASSIGN_OR_RETURN(RenderedChat rendered, model.chat->Render(request.chat(), true));
      spec->prompt = std::move(rendered.ids);
      spec->chat = true;
      spec->reasoning_open = rendered.reasoning_open;
      break;
    }
    case v1::GenerateRequest::PROMPT_NOT_SET:
      return Bad("prompt", "none of text, token_ids and chat is set");
  }
  if (spec->prompt.empty()) return Bad("prompt", "it has no tokens");
  return absl::OkStatus();
}

absl::Status ResolveStops(const v1::StopParams& in, const ServedModel& model, const RequestLimits& limits,
                          RequestSpec* spec) {
  const auto prompt = static_cast<uint32_t>(spec->prompt.size());
  if (spec->prompt.size() >= limits.max_context) {
    return Bad("prompt", spec->prompt.size(), " tokens and an answer do not fit the context of ",
               limits.max_context);
  }
  if (in.has_max_tokens() && in.max_tokens() == 0) return Bad("stop.max_tokens", "0 is not positive");
  const uint32_t room = limits.max_context - prompt;
  spec->max_tokens = room;
  if (in.has_max_tokens()) {
    spec->max_tokens = std::min(room, in.max_tokens());
  } else if (const auto& most = model.config.sampling.max_new_tokens; most.has_value() && *most > 0) {
    spec->max_tokens = static_cast<uint32_t>(std::min<int64_t>(room, *most));
  }
  if (in.min_tokens() > spec->max_tokens) {
    return Bad("stop.min_tokens", in.min_tokens(), " is more than the ", spec->max_tokens,
               " tokens that the answer may have");
  }
  spec->sampling.set_min_tokens(in.min_tokens());
  if (static_cast<size_t>(in.stop_token_ids_size()) > kMaxStopTokens) {
    return Bad("stop.stop_token_ids", in.stop_token_ids_size(), " ids, the most is ", kMaxStopTokens);
  }
  std::vector<uint32_t> stops;
  if (!in.ignore_eos()) stops.assign(model.config.eos_token_ids.begin(), model.config.eos_token_ids.end());
  for (const uint32_t id : in.stop_token_ids()) {
    if (id >= model.config.vocab_size) {
      return Bad("stop.stop_token_ids", id, " is not below the vocabulary's ", model.config.vocab_size);
    }
    stops.push_back(id);
  }
  std::sort(stops.begin(), stops.end());
  stops.erase(std::unique(stops.begin(), stops.end()), stops.end());
  spec->sampling.mutable_stop_token_ids()->Add(stops.begin(), stops.end());
  if (in.stop_size() > 0) {
    const std::vector<std::string> strings(in.stop().begin(), in.stop().end());
    KDT_ASSIGN_OR_RETURN(spec->stops, StopStrings::Create(strings));
  }
  spec->include_stop = in.include_stop();
  return absl::OkStatus();
}

absl::Status ResolveSpeculation(const v1::SpeculationParams& in, const RequestLimits& limits,
                                RequestSpec* spec) {
  switch (in.mode()) {
    case v1::SpeculationParams::DEFAULT:
      spec->mode = SpeculationMode::kDefault;
      break;
    case v1::SpeculationParams::OFF:
      spec->mode = SpeculationMode::kOff;
      break;
    case v1::SpeculationParams::CHAIN:
      spec->mode = SpeculationMode::kChain;
      break;
    case v1::SpeculationParams::TREE:
      spec->mode = SpeculationMode::kTree;
      break;
    default:
      return Bad("speculation.mode", static_cast<int>(in.mode()), " is not a mode");
  }
  if (!in.has_budget()) return absl::OkStatus();
  if (in.budget() > limits.max_budget) {
    return Bad("speculation.budget", in.budget(), " nodes, the most is ", limits.max_budget);
  }
  spec->budget = in.budget();
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<RequestSpec> CheckRequest(const v1::GenerateRequest& request, const ServedModel& model,
                                         const RequestLimits& limits) {
  RequestSpec spec;
  if (request.request_id().size() > kMaxRequestIdBytes) {
    return Bad("request_id", request.request_id().size(), " bytes, the most is ", kMaxRequestIdBytes);
  }
  KDT_RETURN_IF_ERROR(ResolveSampling(request.sampling(), model.config, &spec.sampling));
  spec.n = request.sampling().has_n() ? request.sampling().n() : 1;
  const uint32_t max_samples = std::min(kMaxSamples, limits.max_samples);
  if (spec.n < 1 || spec.n > max_samples) {
    return Bad("sampling.n", spec.n, " is not in [1, ", max_samples, "]");
  }
  if (request.output().logprobs() > kMaxLogprobs) {
    return Bad("output.logprobs", request.output().logprobs(), ", the most is ", kMaxLogprobs);
  }
  if (request.output().prompt_logprobs() > kMaxLogprobs) {
    return Bad("output.prompt_logprobs", request.output().prompt_logprobs(), ", the most is ", kMaxLogprobs);
  }
  spec.sampling.set_logprobs(request.output().logprobs());
  spec.prompt_logprobs = request.output().prompt_logprobs();
  spec.skip_special = request.output().skip_special_tokens();
  KDT_RETURN_IF_ERROR(ResolveSpeculation(request.speculation(), limits, &spec));
  KDT_RETURN_IF_ERROR(ResolvePrompt(request, model, &spec));
  KDT_RETURN_IF_ERROR(ResolveStops(request.stop(), model, limits, &spec));
  spec.sampling.set_prompt_length(static_cast<uint32_t>(spec.prompt.size()));
  spec.priority = request.priority();
  spec.request_id =
      request.request_id().empty() ? absl::StrFormat("req-%016x", Draw64()) : request.request_id();
  return spec;
}

}  // namespace kdt
