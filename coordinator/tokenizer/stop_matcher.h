// Finds stop strings in text that arrives in pieces, and says how much of it may be shown.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace kdt {

// The compiled stop strings of a request, shared by its samples.
class StopStrings {
 public:
  static constexpr size_t kMaxStrings = 64;
  static constexpr size_t kMaxBytes = 4096;  // of one string

  // INVALID_ARGUMENT naming "stop.stop[i]" for an empty, too long or non-UTF-8 string, or "stop.stop" for too
  // many.
  static absl::StatusOr<std::shared_ptr<const StopStrings>> Create(std::span<const std::string> strings);

  const std::vector<std::string>& strings() const { return strings_; }

 private:
  friend class StopMatcher;
  std::vector<std::string> strings_;
  // Knuth-Morris-Pratt: borders_[s][i] is the length of the longest proper border of the first i + 1 bytes.
  std::vector<std::vector<uint32_t>> borders_;
};

// One text's matcher. The match is the one that ends first (the longest of those that end together), which
// does not depend on how the text was cut into pieces. Cost: O(bytes x number of stop strings).
class StopMatcher {
 public:
  struct Result {
    std::string text;             // may be shown now
    std::optional<size_t> match;  // index into strings() of the stop string found; the text ends here
  };

  // With include_stop the matched string is the end of the text, else the text ends before it.
  StopMatcher(std::shared_ptr<const StopStrings> stops, bool include_stop);

  // Takes the next piece. Holds back only the longest suffix that could begin a stop string. After a match
  // the rest of `piece` is dropped, and further calls return nothing.
  Result Push(std::string_view piece);

  // The end of the text without a match: what was held back. The matcher is then as new.
  std::string Flush();

  bool matched() const { return matched_; }

 private:
  std::shared_ptr<const StopStrings> stops_;
  bool include_stop_;
  bool matched_ = false;
  std::vector<uint32_t> state_;  // per stop string: how many of its bytes the text ends with
  std::string held_;
};

}  // namespace kdt
