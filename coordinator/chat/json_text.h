// JSON that clients and models write, checked and put into the chat template's form.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace kdt {

// A JSON object without white space, its keys in the given order, non-ASCII characters as they are.
// INVALID_ARGUMENT for anything but one valid object, for a key that occurs twice, and for more than 64
// levels.
absl::StatusOr<std::string> CompactJsonObject(const std::string& text);

// Whether the text is one valid JSON object, with white space around it or not. Any depth.
bool IsJsonObject(const std::string& text);

}  // namespace kdt
