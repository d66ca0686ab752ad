// Text to token ids and back, with a Kimi checkpoint's own files.
//
// Vocabulary: n ranks of tiktoken.model (ids 0..n-1, each a byte string) followed by 256 reserved ids, the
// control tokens. Their names come from tokenizer_config.json's added_tokens_decoder; a reserved id without
// an entry is called <|reserved_token_ID|>. n + 256 must be config.json's vocab_size.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kdt {

// The three files' contents; `name_prefix` stands before the file name in errors ("folder/").
struct TokenizerFiles {
  std::string tiktoken_model;    // one "BASE64 RANK" a line
  std::string tokenizer_config;  // JSON
  std::string config;            // JSON, flat or with text_config
  std::string name_prefix;
};

// Immutable after loading; every method may be called from any thread.
class Tokenizer {
 public:
  static constexpr uint32_t kReservedIds = 256;

  // Reads tiktoken.model, tokenizer_config.json and config.json in `model_dir`. NOT_FOUND for a missing file,
  // INVALID_ARGUMENT naming file and line or field for anything else that is wrong with them.
  static absl::StatusOr<std::shared_ptr<const Tokenizer>> Load(const std::string& model_dir);
  static absl::StatusOr<std::shared_ptr<const Tokenizer>> Parse(const TokenizerFiles& files);
  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  // Token ids of `text`, no BOS added. With parse_special the names of control tokens become their ids;
  // without it they are ordinary text, so that user text can never forge a turn. Text is cut at 400,000
  // characters, and within that at runs of 25,000 whitespace or other characters, before it is split and
  // merged, as the checkpoint's own tokenizer does. Time is O(n log n) whatever the text. INVALID_ARGUMENT
  // when the text is not UTF-8, with the byte offset.
  absl::StatusOr<std::vector<uint32_t>> Encode(std::string_view text, bool parse_special) const;
  // The same, appended to *ids. *ids is unchanged on error.
  absl::Status EncodeTo(std::string_view text, bool parse_special, std::vector<uint32_t>* ids) const;

  // The text of all ids together. Bytes that are not UTF-8 become U+FFFD, one a maximal broken part, so the
  // result is always valid. skip_special leaves out the ids that IsSkippedSpecial() names.
  // INVALID_ARGUMENT for an id >= vocab_size(), with its index.
  absl::StatusOr<std::string> Decode(std::span<const uint32_t> ids, bool skip_special) const;

  // The bytes one id stands for: a rank's bytes (maybe part of a character) or a control token's name. The
  // view lives as long as the tokenizer. INVALID_ARGUMENT for an id >= vocab_size().
  absl::StatusOr<std::string_view> TokenBytes(uint32_t id) const;

  uint32_t vocab_size() const;
  // Control tokens: the 256 reserved ids.
  bool IsSpecial(uint32_t id) const;
  // Those dropped from text by skip_special_tokens: control tokens, except the ones that added_tokens_decoder
  // marks "special": false (the <think> and tool-call tags, which carry meaning for a reader).
  bool IsSkippedSpecial(uint32_t id) const;
  // NOT_FOUND naming the token when the vocabulary has no such control token.
  absl::StatusOr<uint32_t> SpecialId(std::string_view name) const;

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kdt
