// What every subcommand prints the same way.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace kdt {

// "kdt: INVALID_ARGUMENT: sampling.top_p: ..." on standard error; returns 1.
int Failed(const absl::Status& status);
// A wrong call of the program on standard error; returns 2.
int WrongCall(const std::string& text);

// Columns as wide as their widest cell, the first row as the head. Cells are UTF-8.
void PrintTable(const std::vector<std::vector<std::string>>& rows);

}  // namespace kdt
