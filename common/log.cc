#include "common/log.h"

#include "absl/strings/str_cat.h"
#include "spdlog/sinks/stdout_color_sinks.h"

namespace kdt {

absl::Status InitLogging(const std::string& name, const std::string& level) {
  static constexpr const char* kLevels[] = {"trace", "debug", "info", "warn", "error"};
  for (const char* known : kLevels) {
    if (level != known) continue;
    auto logger =
        std::make_shared<spdlog::logger>(name, std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    logger->set_pattern("%Y-%m-%dT%H:%M:%S.%e %^%l%$ [%n] %v");
    logger->set_level(spdlog::level::from_str(level));
    logger->flush_on(spdlog::level::trace);
    spdlog::set_default_logger(std::move(logger));
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("log_level \"", level, "\" is not one of trace, debug, info, warn, error"));
}

}  // namespace kdt
