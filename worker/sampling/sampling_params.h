// A sequence's sampling parameters, checked.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace kdt {

namespace v1 {
class SamplingState;
}

struct SamplingParams {
  float temperature = 1;  // 0: greedy
  float top_p = 1;
  int64_t top_k = 0;  // 0: off
  float min_p = 0;
  float repetition_penalty = 1;
  float frequency_penalty = 0;
  float presence_penalty = 0;
  std::vector<std::pair<int32_t, float>> logit_bias;  // by rising id
  uint64_t seed = 0;
  int64_t prompt_length = 0;
  int64_t min_tokens = 0;
  std::vector<int32_t> stop_token_ids;
  int64_t logprobs = 0;

  bool Greedy() const { return temperature == 0; }
  bool Penalizes() const {
    return repetition_penalty != 1 || frequency_penalty != 0 || presence_penalty != 0;
  }
  // Some tokens are cut before the draw. Never with greedy: the best token always stays.
  bool Truncates() const { return !Greedy() && (top_k > 0 || top_p < 1 || min_p > 0); }
};

// Smallest temperature above 0 that is drawn with; below it logits / T could overflow float32, so it means 0.
inline constexpr float kMinTemperature = 1e-6f;

// Ranges as in worker.proto; INVALID_ARGUMENT names the field. `max_logprobs`: largest k for logprobs.
absl::StatusOr<SamplingParams> ParseSamplingState(const v1::SamplingState& state, int64_t vocab_size,
                                                  int64_t max_logprobs);

}  // namespace kdt
