#include "common/flags.h"

#include <cstdio>
#include <cstdlib>

#include "absl/flags/parse.h"
#include "absl/flags/usage.h"

namespace kdt {

std::vector<std::string> ParseFlags(int argc, char** argv, const std::string& usage, size_t max_positional) {
  absl::SetProgramUsageMessage(usage);
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
