// The subcommands of kdt. Each takes the arguments behind its name that are not flags and returns the exit
// status: 0, 1 for an error told on standard error, 2 for a wrong call.
#pragma once

#include <string>
#include <vector>

namespace kdt {

int GenerateCommand(const std::vector<std::string>& args);
int ChatCommand(const std::vector<std::string>& args);
int TokenizeCommand(const std::vector<std::string>& args);
int InfoCommand(const std::vector<std::string>& args);
int BenchCommand(const std::vector<std::string>& args);

}  // namespace kdt
