// Command-line flags of our binaries: absl flags, strict.
#pragma once

#include <string>
#include <vector>

namespace kdt {

// Parses absl flags. An unknown flag or a bad value prints what is wrong and exits (absl's behaviour).
// Positional arguments beyond `max_positional` print `usage` and exit with 2. Returns the positional
// arguments without the program's name.
std::vector<std::string> ParseFlags(int argc, char** argv, const std::string& usage,
                                    size_t max_positional = 0);

}  // namespace kdt
