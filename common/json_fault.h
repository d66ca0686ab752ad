// What is wrong with a text that is not valid JSON, for people.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace kdt {

// "line 3, column 7: expected ':' behind a field's name, found '1'", about the first fault; columns count
// characters from 1. Empty for valid JSON.
std::string JsonFault(absl::string_view text);

// The text as a value. INVALID_ARGUMENT is "NAME: not valid JSON: " and the fault. `watch` is told of what
// the parser meets.
absl::StatusOr<nlohmann::json> ParseJson(absl::string_view text, absl::string_view name,
                                         const nlohmann::json::parser_callback_t& watch = nullptr);

}  // namespace kdt
