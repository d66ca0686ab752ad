// Text of a growing list of token ids: whole characters only.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "coordinator/tokenizer/tokenizer.h"

namespace kdt {

// Everything that Push() and Flush() return, put together, equals Tokenizer::Decode() of all ids, however the
// ids were spread over calls. Each returned piece is valid UTF-8 by itself.
class StreamDecoder {
 public:
  StreamDecoder(std::shared_ptr<const Tokenizer> tokenizer, bool skip_special);

  // The text that `ids` complete. Up to three bytes of an unfinished character are held back.
  // INVALID_ARGUMENT for an id >= vocab_size; the decoder is then unchanged.
  absl::StatusOr<std::string> Push(std::span<const uint32_t> ids);
  absl::StatusOr<std::string> Push(uint32_t id) { return Push(std::span<const uint32_t>(&id, 1)); }

  // The end of the text: U+FFFD when an unfinished character is held back, else empty. The decoder is then as
  // new.
  std::string Flush();

 private:
  std::shared_ptr<const Tokenizer> tokenizer_;
  bool skip_special_;
  std::string held_;  // the start of a character
};

}  // namespace kdt
