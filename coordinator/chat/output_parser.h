// Takes an assistant's answer apart as it is generated: reasoning, content and tool calls.
//
//   [<think>] reasoning </think> content
//   <|tool_calls_section_begin|> (<|tool_call_begin|> functions.NAME:IDX <|tool_call_argument_begin|> JSON
//   <|tool_call_end|>)* <|tool_calls_section_end|>
//
// Models do not always keep to it. A tool-section token ends an open reasoning span. A call is delivered when
// it is complete; one that is broken (no arguments, no name, arguments that are not a JSON object, cut off by
// the end) comes out as content text with its tags by name, so nothing vanishes. Tags that say nothing in
// their place (a second <think>, a </think> or the end of a section where none is open) are dropped.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/chat/control_tokens.h"
#include "coordinator/tokenizer/stream_decoder.h"
#include "coordinator/tokenizer/tokenizer.h"

namespace kdt {

struct ParsedToolCall {
  std::string id;              // as the model wrote it, "functions.get_weather:0"
  std::string name;            // "get_weather"
  std::string arguments_json;  // a JSON object, as the model wrote it
};

// What some tokens added to the answer. Each text is valid UTF-8 by itself.
struct ChatDelta {
  std::string reasoning;
  std::string content;
  std::vector<ParsedToolCall> tool_calls;

  bool empty() const { return reasoning.empty() && content.empty() && tool_calls.empty(); }
};

class ChatOutputParser {
 public:
  // reasoning_open: the prompt ended in <think> (RenderedChat::reasoning_open). skip_special leaves control
  // tokens that have no part in the format out of the text; otherwise they appear by name.
  ChatOutputParser(std::shared_ptr<const Tokenizer> tokenizer, const ControlTokens& tokens,
                   bool reasoning_open, bool skip_special);

  // Takes generated ids in order. To look for stop strings token by token, push one id at a time. The token
  // that ends the answer (<|im_end|>) is not meant to be pushed. INVALID_ARGUMENT for an id >= vocab_size;
  // the ids before it were taken.
  absl::StatusOr<ChatDelta> Push(std::span<const uint32_t> ids);
  absl::StatusOr<ChatDelta> Push(uint32_t id) { return Push(std::span<const uint32_t>(&id, 1)); }

  // The end of the answer: whatever was held back, an unfinished call as content.
  ChatDelta Flush();

  // Tokens between <think> and </think>, the tags not counted.
  uint32_t reasoning_tokens() const { return reasoning_tokens_; }
  // Complete tool calls so far; with any, the finish reason is TOOL_CALLS.
  uint32_t tool_calls() const { return tool_calls_; }

 private:
  enum class State {
    kReasoning,
    kContent,
    kSection,    // inside the tool section, between calls
    kHeader,     // after <|tool_call_begin|>
    kArguments,  // after <|tool_call_argument_begin|>
  };

  absl::Status Take(uint32_t id, ChatDelta* delta);
  // Ends the text that the decoder is in the middle of; every tag does so.
  void EndSpan(ChatDelta* delta);
  void AppendText(std::string_view text, ChatDelta* delta);
  // Text between the calls of a section: white space is dropped, anything else is content.
  void ReleaseLoose(ChatDelta* delta);
  // The open call is complete: delivers it, or gives it up.
  void FinishCall(ChatDelta* delta);
  // The open call, if any, is broken: its text becomes content. `end` is the tag that closed it, or empty.
  void GiveUpCall(std::string_view end, ChatDelta* delta);
  void LeaveCall();
  std::string_view Name(uint32_t id) const;

  std::shared_ptr<const Tokenizer> tokenizer_;
  ControlTokens tokens_;
  StreamDecoder decoder_;
  State state_;
  bool section_open_ = false;  // a call may also stand outside of a section
  std::string header_;         // of the open call
  std::string arguments_;      // of the open call
  std::string loose_;          // text in the section outside of calls
  uint32_t reasoning_tokens_ = 0;
  uint32_t tool_calls_ = 0;
};

}  // namespace kdt
