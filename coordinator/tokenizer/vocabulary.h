// What a checkpoint's tokenizer files say: the byte strings of the ranks and the names of the control tokens.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/tokenizer/tokenizer.h"

namespace kdt {

class Vocabulary {
 public:
  // Errors as Tokenizer::Load(): they name file and line, or file and field.
  static absl::StatusOr<Vocabulary> Parse(const TokenizerFiles& files);

  uint32_t ranks() const { return ranks_; }
  // Ranks and reserved ids.
  uint32_t size() const { return ranks_ + Tokenizer::kReservedIds; }
  // The bytes of a rank, or the name of a reserved id. id < size().
  std::string_view Bytes(uint32_t id) const {
    return std::string_view(bytes_).substr(offsets_[id], offsets_[id + 1] - offsets_[id]);
  }
  // Of a reserved id: not marked "special": false.
  bool IsSkipped(uint32_t id) const { return skipped_[id - ranks_]; }

 private:
  uint32_t ranks_ = 0;
  std::string bytes_;              // of all ids, end to end
  std::vector<uint32_t> offsets_;  // size() + 1
  std::vector<bool> skipped_;      // kReservedIds
};

}  // namespace kdt
