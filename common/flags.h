// Command-line flags of our binaries: absl flags, strict.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kdt {

// Makes --help list every flag of the program, whichever file defines it (absl shows those of the file named
// like the program alone, and ours are called main.cc). ParseFlags does it; a program that parses with absl
// calls it first.
void ListOwnFlagsInHelp();

// Parses absl flags. An unknown flag or a bad value prints what is wrong and exits (absl's behaviour).
// Positional arguments beyond `max_positional` print `usage` and exit with 2. Returns the positional
// arguments without the program's name.
std::vector<std::string> ParseFlags(int argc, char** argv, const std::string& usage,
                                    size_t max_positional = 0);

// Whether the flag has another value than its default; there must be such a flag.
bool FlagIsSet(absl::string_view name);

// "--NAME does nothing WHY": such a flag is refused, since whoever gave it counts on it.
absl::Status FlagDoesNothing(absl::string_view name, absl::string_view why);

}  // namespace kdt
