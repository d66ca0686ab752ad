#include "client/command_flags.h"

#include <algorithm>
#include <set>
#include <vector>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace kdt {
namespace {

using Names = std::set<std::string>;

struct Command {
  std::string name;
  Names flags;
};

Names All(std::initializer_list<Names> parts) {
  Names all;
  for (const Names& part : parts) all.insert(part.begin(), part.end());
  return all;
}

std::vector<Command> Commands() {
  const Names connection = {"server",       "tls",
                            "tls_ca",       "tls_cert",
                            "tls_key",      "tls_server_name",
                            "api_key_file", "allow_insecure_api_keys"};
  // What a generated answer is to be like; what is for one kind of command alone stands with that.
  const Names request = {"temperature",
                         "top_p",
                         "top_k",
                         "min_p",
                         "repetition_penalty",
                         "frequency_penalty",
                         "presence_penalty",
                         "logit_bias",
                         "seed",
                         "max_tokens",
                         "min_tokens",
                         "stop",
                         "ignore_eos",
                         "include_stop",
                         "priority",
                         "speculation",
                         "budget"};
  const Names load = {"concurrency",   "requests", "warmup", "prompt_tokens",
                      "output_tokens", "prompts",  "json"};
  return {{"generate", All({connection, request, {"prompt", "echo", "summary", "n", "logprobs"}})},
          {"chat", All({connection, request, {"message", "system", "thinking"}})},
          {"tokenize", All({connection, {"parse_special"}})},
          {"info", connection},
          {"bench", All({connection, request, load, {"n"}})}};
}

}  // namespace

absl::Status CheckFlagsOf(const std::string& command) {
  const std::vector<Command> commands = Commands();
  const auto found = std::find_if(commands.begin(), commands.end(),
                                  [&](const Command& known) { return known.name == command; });
  if (found == commands.end()) return absl::OkStatus();
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    // Abseil's own work everywhere.
    if (absl::StrContains(flag->Filename(), "absl/") || flag->CurrentValue() == flag->DefaultValue())
      continue;
    const std::string flag_name(name);
    if (found->flags.contains(flag_name)) continue;
    std::vector<std::string> takers;
    for (const Command& other : commands) {
      if (other.flags.contains(flag_name)) takers.push_back(other.name);
    }
    return absl::InvalidArgumentError(absl::StrCat("--", flag_name, ": ", command, " does not take it; ",
                                                   absl::StrJoin(takers, ", "),
                                                   takers.size() == 1 ? " does" : " do"));
  }
  return absl::OkStatus();
}

}  // namespace kdt
