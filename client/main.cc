// kdt: the command-line client.
#include <cstdio>
#include <string>
#include <vector>

#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "client/command_flags.h"
#include "client/commands.h"
#include "client/report.h"
#include "client/tree_command.h"
#include "common/flags.h"

namespace {

constexpr char kUsage[] =
    "command-line client of kdtree-engine\n\n"
    "  kdt generate \"TEXT\"        stream a completion\n"
    "  kdt chat [--message TEXT]  one chat turn, or a conversation from standard input\n"
    "  kdt tokenize \"TEXT\"        ids of a text\n"
    "  kdt info                   model and ranks\n"
    "  kdt bench                  load: time to first token, inter-token time, throughput\n"
    "  kdt tree FILE              draw draft trees (see kdt tree --help)\n\n"
    "All but tree talk to --server HOST:PORT. kdt --help lists every flag; one that\na command does not take "
    "is refused.";

int Run(int argc, char** argv) {
  // tree works without a server and reads its own arguments.
  if (argc > 1 && std::string(argv[1]) == "tree") {
    return kdt::RunTreeCommand(std::vector<std::string>(argv + 2, argv + argc));
  }
  absl::SetProgramUsageMessage(kUsage);
  kdt::ListOwnFlagsInHelp();
  const std::vector<char*> positional = absl::ParseCommandLine(argc, argv);
  if (positional.size() < 2) {
    std::fprintf(stderr, "%s\n", kUsage);
    return 2;
  }
  const std::string command = positional[1];
  const std::vector<std::string> args(positional.begin() + 2, positional.end());
  if (const absl::Status status = kdt::CheckFlagsOf(command); !status.ok()) {
    return kdt::WrongCall(std::string(status.message()));
  }
  if (command == "generate") return kdt::GenerateCommand(args);
  if (command == "chat") return kdt::ChatCommand(args);
  if (command == "tokenize") return kdt::TokenizeCommand(args);
  if (command == "info") return kdt::InfoCommand(args);
  if (command == "bench") return kdt::BenchCommand(args);
  return kdt::WrongCall("unknown command \"" + command + "\"; kdt --help lists them");
}

}  // namespace

int main(int argc, char** argv) {
  const int status = Run(argc, argv);
  // A full disk or a closed pipe takes part of the answer.
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return status;
  std::fprintf(stderr, "kdt: standard output could not be written\n");
  return 1;
}
