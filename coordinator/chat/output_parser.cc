#include "coordinator/chat/output_parser.h"

#include <algorithm>
#include <utility>

#include "common/status.h"
#include "coordinator/chat/json_text.h"

namespace kdt {
namespace {

std::string_view Trim(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  const size_t first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return "";
  return text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

// "get_weather" of "functions.get_weather:0"; the prefix may be missing. Empty when the id has another form.
std::string_view FunctionName(std::string_view id) {
  constexpr std::string_view kPrefix = "functions.";
  const size_t colon = id.rfind(':');
  if (colon == std::string_view::npos) return "";
  const std::string_view index = id.substr(colon + 1);
  if (index.empty() ||
      !std::all_of(index.begin(), index.end(), [](char c) { return c >= '0' && c <= '9'; })) {
    return "";
  }
  std::string_view name = id.substr(0, colon);
  if (name.starts_with(kPrefix)) name.remove_prefix(kPrefix.size());
  return name.find_first_of(" \t\r\n") == std::string_view::npos ? name : "";
}

}  // namespace

ChatOutputParser::ChatOutputParser(std::shared_ptr<const Tokenizer> tokenizer, const ControlTokens& tokens,
                                   bool reasoning_open, bool skip_special)
    : tokenizer_(tokenizer),
      tokens_(tokens),
      decoder_(std::move(tokenizer), skip_special),
      state_(reasoning_open ? State::kReasoning : State::kContent) {}

absl::StatusOr<ChatDelta> ChatOutputParser::Push(std::span<const uint32_t> ids) {
  ChatDelta delta;
  for (const uint32_t id : ids) KDT_RETURN_IF_ERROR(Take(id, &delta));
  return delta;
}

ChatDelta ChatOutputParser::Flush() {
  ChatDelta delta;
  EndSpan(&delta);
  GiveUpCall("", &delta);
  ReleaseLoose(&delta);
  return delta;
}

absl::Status ChatOutputParser::Take(uint32_t id, ChatDelta* delta) {
  const bool in_call = state_ == State::kHeader || state_ == State::kArguments;
  if (id == tokens_.think_begin && (state_ == State::kContent || state_ == State::kReasoning)) {
    if (state_ == State::kContent) EndSpan(delta);
    state_ = State::kReasoning;
  } else if (id == tokens_.think_end && (state_ == State::kContent || state_ == State::kReasoning)) {
    if (state_ == State::kReasoning) EndSpan(delta);
    state_ = State::kContent;
  } else if (id == tokens_.tool_calls_section_begin || id == tokens_.tool_calls_section_end) {
    EndSpan(delta);
    GiveUpCall("", delta);
    ReleaseLoose(delta);
    section_open_ = id == tokens_.tool_calls_section_begin;
    state_ = section_open_ ? State::kSection : State::kContent;
  } else if (id == tokens_.tool_call_begin) {
    EndSpan(delta);
    GiveUpCall("", delta);
    ReleaseLoose(delta);
    state_ = State::kHeader;
  } else if (id == tokens_.tool_call_argument_begin && state_ == State::kHeader) {
    EndSpan(delta);
    state_ = State::kArguments;
  } else if (id == tokens_.tool_call_end && in_call) {
    EndSpan(delta);
    FinishCall(delta);
  } else if (id == tokens_.tool_call_argument_begin || id == tokens_.tool_call_end) {
    // Out of place: shown by name. Reasoning ends at any tool tag.
    EndSpan(delta);
    if (state_ == State::kReasoning) state_ = State::kContent;
    AppendText(Name(id), delta);
  } else {
    KDT_ASSIGN_OR_RETURN(const std::string text, decoder_.Push(id));
    AppendText(text, delta);
    if (state_ == State::kReasoning) ++reasoning_tokens_;
  }
  return absl::OkStatus();
}

void ChatOutputParser::EndSpan(ChatDelta* delta) { AppendText(decoder_.Flush(), delta); }

void ChatOutputParser::AppendText(std::string_view text, ChatDelta* delta) {
  switch (state_) {
    case State::kReasoning:
      delta->reasoning += text;
      break;
    case State::kContent:
      delta->content += text;
      break;
    case State::kSection:
      loose_ += text;
      break;
    case State::kHeader:
      header_ += text;
      break;
    case State::kArguments:
      arguments_ += text;
      break;
  }
}

void ChatOutputParser::ReleaseLoose(ChatDelta* delta) {
  if (!Trim(loose_).empty()) delta->content += loose_;
  loose_.clear();
}

void ChatOutputParser::FinishCall(ChatDelta* delta) {
  const std::string_view id = Trim(header_);
  const std::string_view name = FunctionName(id);
  // A function without parameters is sometimes called with nothing at all.
  const std::string_view written = Trim(arguments_);
  std::string arguments(written.empty() ? "{}" : written);
  if (state_ != State::kArguments || name.empty() || !IsJsonObject(arguments)) {
    GiveUpCall(Name(tokens_.tool_call_end), delta);
    return;
  }
  delta->tool_calls.push_back({std::string(id), std::string(name), std::move(arguments)});
  ++tool_calls_;
  LeaveCall();
}

void ChatOutputParser::GiveUpCall(std::string_view end, ChatDelta* delta) {
  if (state_ != State::kHeader && state_ != State::kArguments) return;
  delta->content += Name(tokens_.tool_call_begin);
  delta->content += header_;
  if (state_ == State::kArguments) {
    delta->content += Name(tokens_.tool_call_argument_begin);
    delta->content += arguments_;
  }
  delta->content += end;
  LeaveCall();
}

void ChatOutputParser::LeaveCall() {
  header_.clear();
  arguments_.clear();
  state_ = section_open_ ? State::kSection : State::kContent;
}

std::string_view ChatOutputParser::Name(uint32_t id) const { return *tokenizer_->TokenBytes(id); }

}  // namespace kdt
