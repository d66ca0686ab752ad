#include "coordinator/chat/chat_renderer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "coordinator/chat/chat_validation.h"
#include "coordinator/chat/json_text.h"
#include "kdt/v1/generation.pb.h"

namespace kdt {
namespace {

// Puts control tokens and ordinary text together. Text between two control tokens is encoded as a whole, so
// that merges run over the seams of its parts just as they do when a template's output is encoded.
class Writer {
 public:
  explicit Writer(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  void Text(const std::string& text) { pending_ += text; }

  absl::Status Control(uint32_t id) {
    KDT_RETURN_IF_ERROR(EncodePending());
    KDT_ASSIGN_OR_RETURN(const std::string_view name, tokenizer_.TokenBytes(id));
    chat_.ids.push_back(id);
    chat_.text += name;
    return absl::OkStatus();
  }

  absl::StatusOr<RenderedChat> Finish() {
    KDT_RETURN_IF_ERROR(EncodePending());
    return std::move(chat_);
  }

 private:
  absl::Status EncodePending() {
    KDT_RETURN_IF_ERROR(tokenizer_.EncodeTo(pending_, /*parse_special=*/false, &chat_.ids));
    chat_.text += pending_;
    pending_.clear();
    return absl::OkStatus();
  }

  const Tokenizer& tokenizer_;
  RenderedChat chat_;
  std::string pending_;
};

absl::StatusOr<std::string> ToolDeclarations(const v1::Chat& chat) {
  std::string json = "[";
  for (int i = 0; i < chat.tools_json_size(); ++i) {
    const absl::StatusOr<std::string> tool = CompactJsonObject(chat.tools_json(i));
    if (!tool.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("chat.tools_json[", i, "] ", std::string(tool.status().message())));
    }
    absl::StrAppend(&json, i == 0 ? "" : ",", *tool);
  }
  return json + "]";
}

// Assistant messages up to this one are history, whose reasoning is dropped: the last that calls no tool.
int LastHistoryMessage(const v1::Chat& chat) {
  if (chat.preserve_thinking()) return -1;
  for (int i = chat.messages_size() - 1; i >= 0; --i) {
    if (chat.messages(i).role() == "assistant" && chat.messages(i).tool_calls_size() == 0) return i;
  }
  return -1;
}

absl::Status BeginTurn(const ControlTokens& tokens, const std::string& role, const std::string& name,
                       Writer* writer) {
  const uint32_t token = role == "user"        ? tokens.im_user
                         : role == "assistant" ? tokens.im_assistant
                                               : tokens.im_system;
  KDT_RETURN_IF_ERROR(writer->Control(token));
  writer->Text(name.empty() ? role : name);
  return writer->Control(tokens.im_middle);
}

absl::Status WriteAssistant(const ControlTokens& tokens, const v1::ChatMessage& message, bool keep_reasoning,
                            Writer* writer) {
  KDT_RETURN_IF_ERROR(writer->Control(tokens.think_begin));
  if (keep_reasoning) writer->Text(message.reasoning_content());
  KDT_RETURN_IF_ERROR(writer->Control(tokens.think_end));
  writer->Text(message.content());
  if (message.tool_calls_size() == 0) return absl::OkStatus();
  KDT_RETURN_IF_ERROR(writer->Control(tokens.tool_calls_section_begin));
  for (const v1::ToolCall& call : message.tool_calls()) {
    KDT_RETURN_IF_ERROR(writer->Control(tokens.tool_call_begin));
    writer->Text(call.id());
    KDT_RETURN_IF_ERROR(writer->Control(tokens.tool_call_argument_begin));
    writer->Text(call.arguments_json());
    KDT_RETURN_IF_ERROR(writer->Control(tokens.tool_call_end));
  }
  return writer->Control(tokens.tool_calls_section_end);
}

}  // namespace

ChatRenderer::ChatRenderer(std::shared_ptr<const Tokenizer> tokenizer, const ControlTokens& tokens)
    : tokenizer_(std::move(tokenizer)), tokens_(tokens) {}

absl::StatusOr<ChatRenderer> ChatRenderer::Create(std::shared_ptr<const Tokenizer> tokenizer) {
  KDT_ASSIGN_OR_RETURN(const ControlTokens tokens, ControlTokens::Find(*tokenizer));
  return ChatRenderer(std::move(tokenizer), tokens);
}

absl::StatusOr<RenderedChat> ChatRenderer::Render(const v1::Chat& chat, bool add_generation_prompt) const {
  KDT_RETURN_IF_ERROR(ValidateChat(chat));
  const bool thinking = !chat.has_thinking() || chat.thinking();
  Writer writer(*tokenizer_);
  if (chat.tools_json_size() != 0) {
    KDT_ASSIGN_OR_RETURN(const std::string tools, ToolDeclarations(chat));
    KDT_RETURN_IF_ERROR(BeginTurn(tokens_, "tool_declare", "", &writer));
    writer.Text(tools);
    KDT_RETURN_IF_ERROR(writer.Control(tokens_.im_end));
  }
  const int last_history = LastHistoryMessage(chat);
  for (int i = 0; i < chat.messages_size(); ++i) {
    const v1::ChatMessage& message = chat.messages(i);
    KDT_RETURN_IF_ERROR(BeginTurn(tokens_, message.role(), message.name(), &writer));
    if (message.role() == "assistant") {
      const bool keep_reasoning = i > last_history && (thinking || chat.preserve_thinking());
      KDT_RETURN_IF_ERROR(WriteAssistant(tokens_, message, keep_reasoning, &writer));
    } else {
      if (message.role() == "tool") writer.Text(absl::StrCat("## Return of ", message.tool_call_id(), "\n"));
      writer.Text(message.content());
    }
    KDT_RETURN_IF_ERROR(writer.Control(tokens_.im_end));
  }
  if (add_generation_prompt) {
    KDT_RETURN_IF_ERROR(BeginTurn(tokens_, "assistant", "", &writer));
    KDT_RETURN_IF_ERROR(writer.Control(tokens_.think_begin));
    if (!thinking) KDT_RETURN_IF_ERROR(writer.Control(tokens_.think_end));
  }
  KDT_ASSIGN_OR_RETURN(RenderedChat rendered, writer.Finish());
  rendered.reasoning_open = add_generation_prompt && thinking;
  return rendered;
}

}  // namespace kdt
