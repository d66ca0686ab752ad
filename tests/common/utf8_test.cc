#include "common/utf8.h"

#include "tests/support/catch.h"
#include "tests/support/code_points.h"

namespace kdt {
namespace {

TEST_CASE("utf8: every code point, and nothing beside it") {
  for (char32_t c = 0; c < 0x110000; ++c) {
    std::string bytes;
    AppendCodePoint(c, &bytes);
    const Utf8Unit unit = NextUtf8(bytes);
    if (c >= 0xD800 && c < 0xE000) {
      REQUIRE(unit.kind == Utf8Unit::kBroken);
    } else {
      REQUIRE(unit.kind == Utf8Unit::kCharacter);
      REQUIRE(unit.code == c);
      REQUIRE(unit.length == bytes.size());
    }
  }
}

TEST_CASE("utf8: broken and incomplete parts") {
  using Kind = Utf8Unit::Kind;
  const auto check = [](std::string_view bytes, Kind kind, int length) {
    const Utf8Unit unit = NextUtf8(bytes);
    CHECK(unit.kind == kind);
    CHECK(int{unit.length} == length);
  };
  check("\x80", Kind::kBroken, 1);              // a continuation alone
  check("\xC1\xBF", Kind::kBroken, 1);          // overlong
  check("\xE0\x9F\xBF", Kind::kBroken, 1);      // overlong
  check("\xF0\x8F\xBF\xBF", Kind::kBroken, 1);  // overlong
  check("\xF4\x90\x80\x80", Kind::kBroken, 1);  // above U+10FFFF
  check("\xF5\x80", Kind::kBroken, 1);
  check("\xE4\xB8x", Kind::kBroken, 2);
  check("\xF0\x9F\x98x", Kind::kBroken, 3);
  check("\xE4", Kind::kIncomplete, 1);
  check("\xF0\x9F\x98", Kind::kIncomplete, 3);
}

TEST_CASE("utf8: validation gives the first bad byte") {
  CHECK(FirstInvalidUtf8("") == std::nullopt);
  CHECK(FirstInvalidUtf8("plain text of more than eight bytes") == std::nullopt);
  CHECK(FirstInvalidUtf8("12345678\u00FC\U0001F600") == std::nullopt);
  CHECK(FirstInvalidUtf8("12345678901\xFF") == std::optional<size_t>(11));
  CHECK(FirstInvalidUtf8("\u00FC\xC3") == std::optional<size_t>(2));
  std::string with_zero("a\0b\xFF", 4);
  CHECK(FirstInvalidUtf8(with_zero) == std::optional<size_t>(3));
}

TEST_CASE("utf8: replacement leaves an unfinished end") {
  std::string text;
  CHECK(AppendUtf8("a\xFF\u00FC\xE4\xB8", &text) == 4);
  CHECK(text == "a\uFFFD\u00FC");
  CHECK(Utf8Text("a\xFF\u00FC\xE4\xB8") == "a\uFFFD\u00FC\uFFFD");
  CHECK(Utf8Text("plain") == "plain");
}

}  // namespace
}  // namespace kdt
