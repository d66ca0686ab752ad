#include "worker/sampling/sampling_params.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "kdt/v1/worker.pb.h"

namespace kdt {
namespace {

absl::Status Bad(const char* field, const char* range, double value) {
  return absl::InvalidArgumentError(absl::StrCat("sampling.", field, " must be ", range, ", is ", value));
}

absl::Status BadId(const char* field, uint32_t id, int64_t vocab_size) {
  return absl::InvalidArgumentError(absl::StrCat("sampling.", field, ": token id ", id,
                                                 " is not below the vocabulary's size ", vocab_size));
}

}  // namespace

absl::StatusOr<SamplingParams> ParseSamplingState(const v1::SamplingState& state, int64_t vocab_size,
                                                  int64_t max_logprobs) {
  SamplingParams params;
  // Written so that a NaN fails.
  if (!(state.temperature() >= 0 && std::isfinite(state.temperature()))) {
    return Bad("temperature", "finite and >= 0", state.temperature());
  }
  params.temperature = state.temperature() < kMinTemperature ? 0.0f : state.temperature();
  if (!(state.top_p() > 0 && state.top_p() <= 1)) return Bad("top_p", "in (0, 1]", state.top_p());
  params.top_p = state.top_p();
  params.top_k = std::min<int64_t>(state.top_k(), vocab_size);
  if (!(state.min_p() >= 0 && state.min_p() <= 1)) return Bad("min_p", "in [0, 1]", state.min_p());
  params.min_p = state.min_p();
  if (!(state.repetition_penalty() > 0 && std::isfinite(state.repetition_penalty()))) {
    return Bad("repetition_penalty", "finite and > 0", state.repetition_penalty());
  }
  params.repetition_penalty = state.repetition_penalty();
  if (!std::isfinite(state.frequency_penalty()))
    return Bad("frequency_penalty", "finite", state.frequency_penalty());
  params.frequency_penalty = state.frequency_penalty();
  if (!std::isfinite(state.presence_penalty()))
    return Bad("presence_penalty", "finite", state.presence_penalty());
  params.presence_penalty = state.presence_penalty();
  for (const auto& [id, bias] : state.logit_bias()) {
    if (id >= vocab_size) return BadId("logit_bias", id, vocab_size);
    if (!std::isfinite(bias)) return Bad("logit_bias", "finite", bias);
    params.logit_bias.emplace_back(static_cast<int32_t>(id), bias);
  }
  std::sort(params.logit_bias.begin(), params.logit_bias.end());
  params.seed = state.seed();
  params.prompt_length = state.prompt_length();
  params.min_tokens = state.min_tokens();
  for (uint32_t id : state.stop_token_ids()) {
    if (id >= vocab_size) return BadId("stop_token_ids", id, vocab_size);
    params.stop_token_ids.push_back(static_cast<int32_t>(id));
  }
  if (state.logprobs() > max_logprobs) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampling.logprobs is ", state.logprobs(), ", the most is ", max_logprobs));
  }
  params.logprobs = state.logprobs();
  return params;
}

}  // namespace kdt
