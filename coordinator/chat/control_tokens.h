// The ids of the control tokens that the Kimi chat format is made of.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "coordinator/tokenizer/tokenizer.h"

namespace kdt {

struct ControlTokens {
  uint32_t im_end = 0;
  uint32_t im_user = 0;
  uint32_t im_assistant = 0;
  uint32_t im_system = 0;
  uint32_t im_middle = 0;
  uint32_t think_begin = 0;
  uint32_t think_end = 0;
  uint32_t tool_calls_section_begin = 0;
  uint32_t tool_calls_section_end = 0;
  uint32_t tool_call_begin = 0;
  uint32_t tool_call_argument_begin = 0;
  uint32_t tool_call_end = 0;

  // FAILED_PRECONDITION naming the first token that the vocabulary lacks: such a model cannot chat.
  static absl::StatusOr<ControlTokens> Find(const Tokenizer& tokenizer);
};

}  // namespace kdt
