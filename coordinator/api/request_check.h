// Checks every field of a request and resolves what is unset.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/model_config.h"
#include "coordinator/chat/chat_renderer.h"
#include "coordinator/scheduler/request.h"
#include "coordinator/tokenizer/tokenizer.h"

namespace kdt {

// What is served. Immutable.
struct ServedModel {
  std::string name;
  ModelConfig config;
  std::shared_ptr<const Tokenizer> tokenizer;
  std::optional<ChatRenderer> chat;  // empty: the vocabulary lacks the chat format
};

// What the group allows.
struct RequestLimits {
  uint32_t max_context = 0;  // prompt and answer together
  uint32_t max_samples = 0;  // n
  uint32_t max_budget = 0;   // drafted nodes of a tree
};

constexpr uint32_t kMaxLogprobs = 20;
constexpr uint32_t kMaxSamples = 64;
constexpr size_t kMaxRequestIdBytes = 256;
constexpr size_t kMaxLogitBias = 1024;
constexpr size_t kMaxStopTokens = 64;

// INVALID_ARGUMENT "FIELD: what is wrong with it" for the first fault; FAILED_PRECONDITION for a chat when
// the model has no chat format. A seed is drawn and a request id made up when unset.
absl::StatusOr<RequestSpec> CheckRequest(const v1::GenerateRequest& request, const ServedModel& model,
                                         const RequestLimits& limits);

}  // namespace kdt
