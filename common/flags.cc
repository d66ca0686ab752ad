#include "common/flags.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/strip.h"

namespace kdt {

void ListOwnFlagsInHelp() {
  absl::FlagsUsageConfig config;
  config.contains_help_flags = [](absl::string_view file) {
    return !absl::StrContains(file, "absl/flags/") && !absl::StrContains(file, "absl/log/");
  };
  config.normalize_filename = [](absl::string_view file) {
    while (absl::ConsumePrefix(&file, "../")) {
    }
    return std::string(file);
  };
  absl::SetFlagsUsageConfig(std::move(config));
}

std::vector<std::string> ParseFlags(int argc, char** argv, const std::string& usage, size_t max_positional) {
  absl::SetProgramUsageMessage(usage);
  ListOwnFlagsInHelp();
  const std::vector<char*> rest = absl::ParseCommandLine(argc, argv);
  std::vector<std::string> positional(rest.begin() + 1, rest.end());
  if (positional.size() > max_positional) {
    std::fprintf(stderr, "unexpected argument \"%s\"\n%s\n", positional[max_positional].c_str(),
                 usage.c_str());
    std::exit(2);
  }
  return positional;
}

}  // namespace kdt
