#include "client/report.h"

#include <algorithm>
#include <cstdio>

#include "absl/strings/str_cat.h"

namespace kdt {

int Failed(const absl::Status& status) {
  std::fprintf(stderr, "kdt: %s\n", status.ToString(absl::StatusToStringMode::kWithNoExtraData).c_str());
  return 1;
}

int WrongCall(const std::string& text) {
  std::fprintf(stderr, "kdt: %s\n", text.c_str());
  return 2;
}

void PrintLogprobs(const v1::PositionLogprobs& position) {
  std::printf("\n[%u %.4f |", position.token().token_id(), position.token().logprob());
  for (const v1::TokenLogprob& top : position.top()) std::printf(" %u %.4f", top.token_id(), top.logprob());
  std::printf("]");
}

void PrintTable(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> width;
  for (const auto& row : rows) {
    width.resize(std::max(width.size(), row.size()), 0);
    for (size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
  }
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      absl::StrAppend(&line, row[i], std::string(i + 1 < row.size() ? width[i] - row[i].size() + 2 : 0, ' '));
    }
    std::printf("%s\n", line.c_str());
  }
}

}  // namespace kdt
