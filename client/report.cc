#include "client/report.h"

#include <algorithm>
#include <cstdio>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace kdt {
namespace {

size_t Characters(const std::string& utf8) {
  return static_cast<size_t>(
      std::count_if(utf8.begin(), utf8.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

}  // namespace

int Failed(const absl::Status& status) {
  std::fprintf(stderr, "kdt: %s\n", status.ToString(absl::StatusToStringMode::kWithNoExtraData).c_str());
  return 1;
}

int WrongCall(const std::string& text) {
  std::fprintf(stderr, "kdt: %s\n", text.c_str());
  return 2;
}

void PrintTable(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> width;
  for (const auto& row : rows) {
    width.resize(std::max(width.size(), row.size()), 0);
    for (size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], Characters(row[i]));
  }
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      absl::StrAppend(&line, row[i],
                      std::string(i + 1 < row.size() ? width[i] - Characters(row[i]) + 2 : 0, ' '));
    }
    absl::StripTrailingAsciiWhitespace(&line);  // of empty last cells
    std::printf("%s\n", line.c_str());
  }
}

}  // namespace kdt
