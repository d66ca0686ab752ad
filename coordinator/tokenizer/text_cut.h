// The cuts that the Kimi tokenizer makes before it looks at words, so that no later step sees an endless run.
#pragma once

#include <cstddef>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace kdt {

inline constexpr size_t kMaxBlockCharacters = 400'000;  // a block of text
inline constexpr size_t kMaxRunCharacters = 25'000;  // whitespace, or anything else, in a row within a block

// Calls `take` with the parts of `text` (valid UTF-8) in order; together they are the text. Ends at the first
// error. "Whitespace" is what Python's str.isspace() says, which the checkpoint's own tokenizer uses: Unicode
// White_Space and U+001C..U+001F.
absl::Status ForEachCut(std::string_view text, absl::FunctionRef<absl::Status(std::string_view)> take);

}  // namespace kdt
