#include "coordinator/chat/chat_validation.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "common/utf8.h"
#include "coordinator/chat/json_text.h"
#include "kdt/v1/generation.pb.h"

namespace kdt {
namespace {

absl::Status CheckText(const std::string& text, const std::string& field) {
  const std::optional<size_t> offset = FirstInvalidUtf8(text);
  if (!offset) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is not valid UTF-8 at byte ", *offset));
}

absl::Status ValidateToolCall(const v1::ToolCall& call, const std::string& field) {
  if (call.id().empty()) return absl::InvalidArgumentError(absl::StrCat(field, ".id must not be empty"));
  if (call.name().empty()) return absl::InvalidArgumentError(absl::StrCat(field, ".name must not be empty"));
  KDT_RETURN_IF_ERROR(CheckText(call.id(), field + ".id"));
  KDT_RETURN_IF_ERROR(CheckText(call.name(), field + ".name"));
  if (!call.arguments_json().empty() && !IsJsonObject(call.arguments_json())) {
    return absl::InvalidArgumentError(absl::StrCat(field, ".arguments_json must be a JSON object"));
  }
  return absl::OkStatus();
}

absl::Status ValidateMessage(const v1::ChatMessage& message, const std::string& field) {
  const std::string& role = message.role();
  if (role != "system" && role != "user" && role != "assistant" && role != "tool") {
    KDT_RETURN_IF_ERROR(CheckText(role, field + ".role"));
    return absl::InvalidArgumentError(
        absl::StrCat(field, ".role must be system, user, assistant or tool, is \"", role, "\""));
  }
  const bool assistant = role == "assistant";
  if (!assistant && message.tool_calls_size() != 0) {
    return absl::InvalidArgumentError(absl::StrCat(field, ".tool_calls is for the role assistant only"));
  }
  if (!assistant && !message.reasoning_content().empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, ".reasoning_content is for the role assistant only"));
  }
  if (role == "tool" && message.tool_call_id().empty()) {
    return absl::InvalidArgumentError(absl::StrCat(field, ".tool_call_id must be set for the role tool"));
  }
  if (role != "tool" && !message.tool_call_id().empty()) {
    return absl::InvalidArgumentError(absl::StrCat(field, ".tool_call_id is for the role tool only"));
  }
  KDT_RETURN_IF_ERROR(CheckText(message.content(), field + ".content"));
  KDT_RETURN_IF_ERROR(CheckText(message.name(), field + ".name"));
  KDT_RETURN_IF_ERROR(CheckText(message.reasoning_content(), field + ".reasoning_content"));
  KDT_RETURN_IF_ERROR(CheckText(message.tool_call_id(), field + ".tool_call_id"));
  for (int i = 0; i < message.tool_calls_size(); ++i) {
    KDT_RETURN_IF_ERROR(ValidateToolCall(message.tool_calls(i), absl::StrCat(field, ".tool_calls[", i, "]")));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateChat(const v1::Chat& chat) {
  if (chat.messages_size() == 0) return absl::InvalidArgumentError("chat.messages must not be empty");
  for (int i = 0; i < chat.messages_size(); ++i) {
    KDT_RETURN_IF_ERROR(ValidateMessage(chat.messages(i), absl::StrCat("chat.messages[", i, "]")));
  }
  return absl::OkStatus();
}

}  // namespace kdt
