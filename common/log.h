// Logging for all processes: spdlog to standard error, one line an event, with the process's name in it.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "spdlog/spdlog.h"

namespace kdt {

// Sets the default logger up. `name` is the process's name in each line ("coordinator", "worker 3").
// `level` is one of trace, debug, info, warn, error; anything else is INVALID_ARGUMENT.
absl::Status InitLogging(const std::string& name, const std::string& level);

}  // namespace kdt
