// What is wrong with a text that is not valid JSON, for people.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace kdt {

// "line 3, column 7: expected ':' behind a field's name, found '1'", about the first fault; columns count
// characters from 1. Empty for valid JSON.
std::string JsonFault(absl::string_view text);

}  // namespace kdt
