// Logging for all processes: spdlog to standard error, one line an event, with the process's name in it.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "spdlog/spdlog.h"

namespace kdt {

// Sets the default logger up. `name` is the process's name in each line ("coordinator", "worker 3").
// `level` is one of trace, debug, info, warn, error; anything else is INVALID_ARGUMENT.
absl::Status InitLogging(const std::string& name, const std::string& level);

}  // namespace kdt

#ifndef ABSL_USES_STD_STRING_VIEW
// Some distributions build Abseil with a string_view of its own; this lets it be logged ("{}",
// status.message()).
template <>
struct fmt::formatter<absl::string_view> : fmt::formatter<fmt::string_view> {
  template <typename Context>
  auto format(absl::string_view text, Context& context) const {
    return fmt::formatter<fmt::string_view>::format(fmt::string_view(text.data(), text.size()), context);
  }
};
#endif
