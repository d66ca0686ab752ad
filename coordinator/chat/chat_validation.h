// What makes a conversation valid.
#pragma once

#include "absl/status/status.h"

namespace kdt {

namespace v1 {
class Chat;
}  // namespace v1

// INVALID_ARGUMENT naming the first bad field ("chat.messages[2].role"):
// no messages; a role that is none of system, user, assistant, tool; tool_calls or reasoning_content on
// another role than assistant; tool_call_id on another role than tool, or none there; a tool call without id
// or name, or whose arguments_json is neither empty nor a JSON object; text that is not UTF-8. tools_json is
// checked where it is read.
absl::Status ValidateChat(const v1::Chat& chat);

}  // namespace kdt
