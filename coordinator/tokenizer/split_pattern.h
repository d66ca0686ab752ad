// Kimi's word pattern: how text falls into the pieces within which byte pairs are merged.
#pragma once

#include <memory>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kdt {

// Immutable; may be used from any thread. Alternatives, first match wins:
//   Han characters | [x]Aa... word with lower case at its end | [x]AA... word with upper case at its start
//   (each with an English contraction, [x] one character that is no letter, number or line break) | 1-3
//   digits | punctuation with a leading space and trailing line breaks | line breaks | trailing spaces |
//   spaces.
// Character properties are those of the installed PCRE2 (Unicode 14 in Debian 12 and Ubuntu 24.04):
// characters that a later Unicode added fall into pieces as unassigned ones do. They still decode to
// themselves.
class SplitPattern {
 public:
  static absl::StatusOr<SplitPattern> Create();

  // Calls `take` with the pieces of `text` (valid UTF-8) in order; together they are the text. Time is linear
  // in the text's length as long as its runs are bounded (text_cut.h).
  absl::Status Split(std::string_view text, absl::FunctionRef<void(std::string_view)> take) const;

 private:
  struct Code;
  explicit SplitPattern(std::shared_ptr<const Code> code);
  std::shared_ptr<const Code> code_;
};

}  // namespace kdt
