// Turns a sample's tokens into what its client may see: text, reasoning, tool calls, up to the first stop
// string.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "coordinator/chat/output_parser.h"
#include "coordinator/scheduler/request.h"
#include "coordinator/tokenizer/stop_matcher.h"
#include "coordinator/tokenizer/stream_decoder.h"

namespace kdt {

// What an answer's text is made with. `control` is empty for a vocabulary without the chat format.
struct TextTools {
  std::shared_ptr<const Tokenizer> tokenizer;
  std::optional<ControlTokens> control;
};

class OutputStream {
 public:
  OutputStream(const TextTools& tools, const RequestSpec& spec);

  struct Taken {
    size_t tokens = 0;           // how many of the ids belong to the answer
    std::optional<size_t> stop;  // index of the stop string that the last of them completed
  };
  // Adds what the ids bring to the chunk's texts and tool calls (token ids and logprobs are the caller's).
  // Stop strings are looked for in the content, not in reasoning, from the token after min_tokens on.
  absl::StatusOr<Taken> Push(std::span<const uint32_t> ids, v1::Chunk* chunk);
  // The end without a stop string: whatever was held back.
  void Flush(v1::Chunk* chunk);

  uint32_t reasoning_tokens() const { return parser_ ? parser_->reasoning_tokens() : 0; }
  bool has_tool_calls() const { return parser_ && parser_->tool_calls() > 0; }

 private:
  absl::StatusOr<std::string> Decode(std::span<const uint32_t> ids, v1::Chunk* chunk);
  std::string TakeDelta(ChatDelta delta, v1::Chunk* chunk);

  std::optional<StreamDecoder> decoder_;    // plain text
  std::optional<ChatOutputParser> parser_;  // chat
  std::optional<StopMatcher> matcher_;
  uint32_t unmatched_tokens_;  // that still come before stop strings count (min_tokens)
};

}  // namespace kdt
