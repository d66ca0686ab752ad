#include "coordinator/tokenizer/stop_matcher.h"

#include <algorithm>
#include <random>

#include "common/utf8.h"
#include "tests/support/catch.h"

namespace kdt {
namespace {

using Strings = std::vector<std::string>;

StopMatcher Matcher(const Strings& stops, bool include_stop = false) {
  return StopMatcher(StopStrings::Create(stops).value(), include_stop);
}

TEST_CASE("stop matcher: a stop string over several pieces is never shown") {
  StopMatcher matcher = Matcher({"\n\nUser:"});
  CHECK(matcher.Push("Hi\n").text == "Hi");
  CHECK(matcher.Push("\nUs").text == "");
  CHECK(matcher.Push("age\n\nUser").text == "\n\nUsage");
  const auto result = matcher.Push(": next");
  CHECK(result.text == "");
  CHECK(result.match == std::optional<size_t>(0));
  CHECK(matcher.matched());
  CHECK(matcher.Push("more").text == "");
  CHECK_FALSE(matcher.Push("more").match.has_value());
}

TEST_CASE("stop matcher: only a suffix that could begin a stop string is held back") {
  StopMatcher matcher = Matcher({"abab", "xyz"});
  CHECK(matcher.Push("aab").text == "a");
  CHECK(matcher.Push("c").text == "abc");
  CHECK(matcher.Push("aba").text == "");
  CHECK(matcher.Push("a").text == "aba");
  CHECK(matcher.Push("xy").text == "a");
  CHECK(matcher.Flush() == "xy");
  CHECK(matcher.Push("z").text == "z");
}

TEST_CASE("stop matcher: the match that ends first wins, then the longest") {
  auto result = Matcher({"abcd", "bc"}).Push("xabcd");
  CHECK(result.text == "xa");
  CHECK(result.match == std::optional<size_t>(1));
  result = Matcher({"bc", "abc", "c"}).Push("xabcd");
  CHECK(result.text == "x");
  CHECK(result.match == std::optional<size_t>(1));
}

TEST_CASE("stop matcher: include_stop keeps the stop string and nothing behind it") {
  StopMatcher matcher = Matcher({"END"}, true);
  CHECK(matcher.Push("a E").text == "a ");
  const auto result = matcher.Push("ND b");
  CHECK(result.text == "END");
  CHECK(result.match.has_value());
}

TEST_CASE("stop matcher: without stop strings everything passes") {
  StopMatcher matcher = Matcher({});
  CHECK(matcher.Push("abc").text == "abc");
  CHECK(matcher.Flush() == "");
}

TEST_CASE("stop matcher: any cut of the text gives the same") {
  std::mt19937 random(7);
  const auto random_string = [&](size_t size) {
    std::string string;
    for (size_t i = 0; i < size; ++i) string += random() % 3 == 0 ? "\u00E4" : random() % 2 ? "a" : "b";
    return string;
  };
  for (int round = 0; round < 500; ++round) {
    Strings stops;
    for (size_t i = random() % 3 + 1; i > 0; --i) stops.push_back(random_string(2 + random() % 6));
    const std::string text = random_string(random() % 60);
    const bool include_stop = round % 2 == 0;

    // Naive: try every end, then the longest stop string that ends there.
    std::optional<size_t> match;
    std::string expected = text;
    for (size_t end = 1; end <= text.size() && !match; ++end) {
      for (size_t s = 0; s < stops.size(); ++s) {
        if (!std::string_view(text).substr(0, end).ends_with(stops[s])) continue;
        if (match && stops[*match].size() >= stops[s].size()) continue;
        match = s;
        expected = text.substr(0, include_stop ? end : end - stops[s].size());
      }
    }

    StopMatcher matcher = Matcher(stops, include_stop);
    std::string shown;
    std::optional<size_t> found;
    for (size_t at = 0; at < text.size() && !found;) {
      size_t size = std::min<size_t>(1 + random() % 5, text.size() - at);
      while (at + size < text.size() && (text[at + size] & 0xC0) == 0x80) ++size;  // whole characters
      const auto result = matcher.Push(std::string_view(text).substr(at, size));
      CHECK(FirstInvalidUtf8(result.text) == std::nullopt);
      shown += result.text;
      found = result.match;
      at += size;
    }
    if (!found) shown += matcher.Flush();
    CHECK(shown == expected);
    CHECK(found == match);
  }
}

TEST_CASE("stop matcher: a long text that keeps almost matching") {
  Strings stops;
  for (int i = 0; i < 8; ++i) stops.push_back(std::string(1000 + i, 'a') + "b");
  StopMatcher matcher = Matcher(stops);
  const std::string piece(1000, 'a');
  size_t shown = 0;
  for (int i = 0; i < 1000; ++i) shown += matcher.Push(piece).text.size();
  CHECK(shown == 1'000'000 - 1007);
  CHECK(matcher.Push("b").match == std::optional<size_t>(7));
}

TEST_CASE("stop strings: bad ones are named") {
  const auto error = [](const Strings& strings) {
    const auto stops = StopStrings::Create(strings);
    CHECK(stops.status().code() == absl::StatusCode::kInvalidArgument);
    return std::string(stops.status().message());
  };
  CHECK(error({"a", ""}) == "stop.stop[1] must not be empty");
  CHECK(error({std::string(4097, 'x')}) == "stop.stop[0] must not be longer than 4096 bytes");
  CHECK(error({"a\xFF"}) == "stop.stop[0] is not valid UTF-8 at byte 1");
  CHECK(error(Strings(65, "x")) == "stop.stop: at most 64 strings, are 65");
}

}  // namespace
}  // namespace kdt
