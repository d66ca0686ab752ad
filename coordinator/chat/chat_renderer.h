// A conversation as the Kimi-K2.6 chat template writes it, straight to token ids.
//
// A turn is <|im_ROLE|>NAME<|im_middle|>TEXT<|im_end|> without newlines. Whatever a client wrote (texts,
// names, ids, tools) is encoded as ordinary text, so it can never produce a control token.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/chat/control_tokens.h"
#include "coordinator/tokenizer/tokenizer.h"

namespace kdt {

namespace v1 {
class Chat;
}  // namespace v1

struct RenderedChat {
  std::vector<uint32_t> ids;
  std::string text;             // the same, with control tokens by name; ambiguous, for people only
  bool reasoning_open = false;  // the prompt ends in <think>: the answer starts as reasoning
};

// Immutable; may be used from any thread.
class ChatRenderer {
 public:
  // FAILED_PRECONDITION when the vocabulary lacks a control token of the format.
  static absl::StatusOr<ChatRenderer> Create(std::shared_ptr<const Tokenizer> tokenizer);

  // add_generation_prompt appends the opening of the assistant's turn: <think>, or <think></think> with
  // thinking off. INVALID_ARGUMENT naming the field ("chat.messages[2].role") when the conversation is not
  // valid.
  absl::StatusOr<RenderedChat> Render(const v1::Chat& chat, bool add_generation_prompt) const;

 private:
  ChatRenderer(std::shared_ptr<const Tokenizer> tokenizer, const ControlTokens& tokens);

  std::shared_ptr<const Tokenizer> tokenizer_;
  ControlTokens tokens_;
};

}  // namespace kdt
