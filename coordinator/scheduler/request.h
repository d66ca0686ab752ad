// A request as the scheduler takes it: every field checked and resolved, nothing unset.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kdt/v1/generation.pb.h"
#include "kdt/v1/worker.pb.h"

namespace kdt {

class StopStrings;

enum class SpeculationMode { kDefault, kOff, kChain, kTree };

struct RequestSpec {
  std::string request_id;        // for the client; not empty
  std::vector<uint32_t> prompt;  // at least one id, all < vocab_size
  // Of sample 0; sample i has seed + i. prompt_length is set; stop_token_ids hold the end token unless
  // ignored.
  v1::SamplingState sampling;
  uint32_t n = 1;
  uint32_t max_tokens = 1;  // >= 1; prompt + max_tokens fit the context
  uint32_t prompt_logprobs = 0;
  std::shared_ptr<const StopStrings> stops;  // null: none
  bool include_stop = false;
  bool skip_special = false;
  bool chat = false;            // take reasoning and tool calls apart
  bool reasoning_open = false;  // chat: the prompt ends inside a reasoning span
  SpeculationMode mode = SpeculationMode::kDefault;
  std::optional<uint32_t> budget;  // drafted nodes; unset: the server's choice
  int32_t priority = 0;            // larger first
};

// Where a request's answers go. Called from the scheduler's thread between and during steps: must not block.
class RequestSink {
 public:
  virtual ~RequestSink() = default;
  // False when the client reads so slowly that no more is buffered; the request is then ended.
  virtual bool Push(v1::GenerateResponse&& response) = 0;
  // The end: OK after the last Complete, else the reason. Nothing comes behind it.
  virtual void End(const absl::Status& status) = 0;
};

}  // namespace kdt
