// kdt tree FILE [--json] [--policy best-first|spine-first|chain] [--budget N]: builds draft trees from a file
// of cases and draws them. Needs no server.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace kdt {

// `args` are the words behind "kdt tree". Prints to standard output, errors to standard error.
// Returns the exit code: 0, 1 for a file that cannot be used, 2 for wrong arguments.
int RunTreeCommand(const std::vector<std::string>& args);

// What it prints. A file is a JSON list of cases (or one case), each an object with
//   topk_ids, topk_logprobs  [positions][k], best first, and budget (drafted nodes; --budget overrides it).
absl::StatusOr<std::string> TreeCommandOutput(const std::vector<std::string>& args);

}  // namespace kdt
