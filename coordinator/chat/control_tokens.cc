#include "coordinator/chat/control_tokens.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace kdt {

absl::StatusOr<ControlTokens> ControlTokens::Find(const Tokenizer& tokenizer) {
  ControlTokens tokens;
  const struct {
    const char* name;
    uint32_t* id;
  } wanted[] = {
      {"<|im_end|>", &tokens.im_end},
      {"<|im_user|>", &tokens.im_user},
      {"<|im_assistant|>", &tokens.im_assistant},
      {"<|im_system|>", &tokens.im_system},
      {"<|im_middle|>", &tokens.im_middle},
      {"<think>", &tokens.think_begin},
      {"</think>", &tokens.think_end},
      {"<|tool_calls_section_begin|>", &tokens.tool_calls_section_begin},
      {"<|tool_calls_section_end|>", &tokens.tool_calls_section_end},
      {"<|tool_call_begin|>", &tokens.tool_call_begin},
      {"<|tool_call_argument_begin|>", &tokens.tool_call_argument_begin},
      {"<|tool_call_end|>", &tokens.tool_call_end},
  };
  for (const auto& token : wanted) {
    const absl::StatusOr<uint32_t> id = tokenizer.SpecialId(token.name);
    if (!id.ok()) {
      return absl::FailedPreconditionError(
          absl::StrCat("this model has no chat format: ", std::string(id.status().message())));
    }
    *token.id = *id;
  }
  return tokens;
}

}  // namespace kdt
