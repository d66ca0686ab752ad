#include "common/flags.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/parse.h"
#include "absl/flags/reflection.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/status.h"

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

bool FlagIsSet(absl::string_view name) {
  const absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
  KDT_CHECK(flag != nullptr);
  return flag->CurrentValue() != flag->DefaultValue();
}

absl::Status FlagDoesNothing(absl::string_view name, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("--", name, " does nothing ", why));
}

}  // namespace kdt
