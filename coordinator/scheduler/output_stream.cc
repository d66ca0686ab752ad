#include "coordinator/scheduler/output_stream.h"

#include <algorithm>
#include <utility>

#include "common/status.h"

namespace kdt {

OutputStream::OutputStream(const TextTools& tools, const RequestSpec& spec)
    : unmatched_tokens_(spec.sampling.min_tokens()) {
  if (spec.chat && tools.control.has_value()) {
    parser_.emplace(tools.tokenizer, *tools.control, spec.reasoning_open, spec.skip_special);
  } else {
    decoder_.emplace(tools.tokenizer, spec.skip_special);
  }
  if (spec.stops != nullptr && !spec.stops->strings().empty())
    matcher_.emplace(spec.stops, spec.include_stop);
}

std::string OutputStream::TakeDelta(ChatDelta delta, v1::Chunk* chunk) {
  chunk->mutable_reasoning_text()->append(delta.reasoning);
  for (ParsedToolCall& call : delta.tool_calls) {
    v1::ToolCall* out = chunk->add_tool_calls();
    out->set_id(std::move(call.id));
    out->set_name(std::move(call.name));
    out->set_arguments_json(std::move(call.arguments_json));
  }
  return std::move(delta.content);
}

absl::StatusOr<std::string> OutputStream::Decode(std::span<const uint32_t> ids, v1::Chunk* chunk) {
  if (decoder_) return decoder_->Push(ids);
  KDT_ASSIGN_OR_RETURN(ChatDelta delta, parser_->Push(ids));
  return TakeDelta(std::move(delta), chunk);
}

absl::StatusOr<OutputStream::Taken> OutputStream::Push(std::span<const uint32_t> ids, v1::Chunk* chunk) {
  Taken taken;
  size_t free_of_stops = ids.size();
  if (matcher_) free_of_stops = std::min<size_t>(free_of_stops, unmatched_tokens_);
  if (free_of_stops > 0) {
    KDT_ASSIGN_OR_RETURN(const std::string text, Decode(ids.first(free_of_stops), chunk));
    chunk->mutable_text()->append(text);
    taken.tokens = free_of_stops;
    unmatched_tokens_ -= static_cast<uint32_t>(std::min<size_t>(unmatched_tokens_, free_of_stops));
  }
  while (taken.tokens < ids.size()) {
    KDT_ASSIGN_OR_RETURN(const std::string text, Decode(ids.subspan(taken.tokens, 1), chunk));
    ++taken.tokens;
    StopMatcher::Result result = matcher_->Push(text);
    chunk->mutable_text()->append(result.text);
    if (!result.match.has_value()) continue;
    taken.stop = result.match;
    break;
  }
  return taken;
}

void OutputStream::Flush(v1::Chunk* chunk) {
  std::string text = decoder_ ? decoder_->Flush() : TakeDelta(parser_->Flush(), chunk);
  if (!matcher_) {
    chunk->mutable_text()->append(text);
    return;
  }
  chunk->mutable_text()->append(matcher_->Push(text).text);
  if (!matcher_->matched()) chunk->mutable_text()->append(matcher_->Flush());
}

}  // namespace kdt
