#include "coordinator/tokenizer/stream_decoder.h"

#include <utility>

#include "common/status.h"
#include "common/utf8.h"

namespace kdt {

StreamDecoder::StreamDecoder(std::shared_ptr<const Tokenizer> tokenizer, bool skip_special)
    : tokenizer_(std::move(tokenizer)), skip_special_(skip_special) {}

absl::StatusOr<std::string> StreamDecoder::Push(std::span<const uint32_t> ids) {
  std::string bytes = held_;
  for (const uint32_t id : ids) {
    KDT_ASSIGN_OR_RETURN(const std::string_view token, tokenizer_->TokenBytes(id));
    if (!skip_special_ || !tokenizer_->IsSkippedSpecial(id)) bytes += token;
  }
  std::string text;
  const size_t taken = AppendUtf8(bytes, &text);
  held_ = bytes.substr(taken);
  return text;
}

std::string StreamDecoder::Flush() {
  if (held_.empty()) return "";
  held_.clear();
  return std::string(kReplacementCharacter);
}

}  // namespace kdt
