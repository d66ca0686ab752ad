#include "coordinator/tokenizer/stop_matcher.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/utf8.h"

namespace kdt {
namespace {

std::vector<uint32_t> Borders(std::string_view string) {
  std::vector<uint32_t> borders(string.size(), 0);
  uint32_t length = 0;
  for (size_t i = 1; i < string.size(); ++i) {
    while (length > 0 && string[i] != string[length]) length = borders[length - 1];
    if (string[i] == string[length]) ++length;
    borders[i] = length;
  }
  return borders;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const StopStrings>> StopStrings::Create(std::span<const std::string> strings) {
  if (strings.size() > kMaxStrings) {
    return absl::InvalidArgumentError(
        absl::StrCat("stop.stop: at most ", kMaxStrings, " strings, are ", strings.size()));
  }
  auto stops = std::make_shared<StopStrings>();
  for (size_t i = 0; i < strings.size(); ++i) {
    const auto fail = [&](const std::string& why) {
      return absl::InvalidArgumentError(absl::StrCat("stop.stop[", i, "] ", why));
    };
    if (strings[i].empty()) return fail("must not be empty");
    if (strings[i].size() > kMaxBytes)
      return fail(absl::StrCat("must not be longer than ", kMaxBytes, " bytes"));
    if (const auto offset = FirstInvalidUtf8(strings[i])) {
      return fail(absl::StrCat("is not valid UTF-8 at byte ", *offset));
    }
    stops->strings_.push_back(strings[i]);
    stops->borders_.push_back(Borders(strings[i]));
  }
  return stops;
}

StopMatcher::StopMatcher(std::shared_ptr<const StopStrings> stops, bool include_stop)
    : stops_(std::move(stops)), include_stop_(include_stop), state_(stops_->strings().size(), 0) {}

StopMatcher::Result StopMatcher::Push(std::string_view piece) {
  Result result;
  if (matched_) return result;
  const std::vector<std::string>& strings = stops_->strings();
  for (size_t i = 0; i < piece.size() && !matched_; ++i) {
    for (size_t s = 0; s < strings.size(); ++s) {
      const std::string& string = strings[s];
      uint32_t& length = state_[s];
      while (length > 0 && piece[i] != string[length]) length = stops_->borders_[s][length - 1];
      if (piece[i] == string[length]) ++length;
      if (length < string.size()) continue;
      if (!result.match || string.size() > strings[*result.match].size()) result.match = s;
      matched_ = true;
    }
    if (matched_) piece = piece.substr(0, i + 1);
  }
  result.text = std::exchange(held_, "");
  result.text += piece;
  if (matched_) {
    if (!include_stop_) result.text.resize(result.text.size() - strings[*result.match].size());
    return result;
  }
  const auto longest = std::max_element(state_.begin(), state_.end());
  const size_t hold = longest == state_.end() ? 0 : *longest;
  held_ = result.text.substr(result.text.size() - hold);
  result.text.resize(result.text.size() - hold);
  return result;
}

std::string StopMatcher::Flush() {
  std::fill(state_.begin(), state_.end(), 0);
  matched_ = false;
  return std::exchange(held_, "");
}

}  // namespace kdt
