// Which flags each subcommand takes: one that would do nothing is refused, since whoever gave it counts on
// it.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace kdt {

// INVALID_ARGUMENT naming the flag of this program that is set and that `command` does not take, and the
// commands that do.
absl::Status CheckFlagsOf(const std::string& command);

}  // namespace kdt
