#include "coordinator/tokenizer/split_pattern.h"

#include <vector>

#include "tests/coordinator/tokenizer/golden_tokenizer.h"

namespace kdt {
namespace {

using Pieces = std::vector<std::string>;

Pieces Split(std::string_view text) {
  static const auto pattern = SplitPattern::Create();
  REQUIRE(pattern.ok());
  Pieces pieces;
  REQUIRE(pattern->Split(text, [&](std::string_view piece) { pieces.emplace_back(piece); }).ok());
  return pieces;
}

TEST_CASE("split pattern: words") {
  CHECK(Split("Hello world") == Pieces{"Hello", " world"});
  CHECK(Split("HTTPServer") == Pieces{"HTTPServer"});
  CHECK(Split("getHTTP") == Pieces{"get", "HTTP"});
  CHECK(Split("don't I'LL WE'Ve x'\u017F") == Pieces{"don't", " I'LL", " WE'Ve", " x'\u017F"});
  CHECK(Split("'tis") == Pieces{"'tis"});
  CHECK(Split("it's's") == Pieces{"it's", "'s"});
  CHECK(Split("\tword\rx") == Pieces{"\tword", "\r", "x"});
  CHECK(Split("stra\u00DFe \u00C9T\u00C9") == Pieces{"stra\u00DFe", " \u00C9T\u00C9"});
  // Title case counts as upper case; a combining mark goes with its letter.
  CHECK(Split("\u01C5ab") == Pieces{"\u01C5ab"});
  CHECK(Split("xe\u0301y") == Pieces{"xe\u0301y"});
}

TEST_CASE("split pattern: Han stands apart from other letters") {
  CHECK(Split("\u4E2D\u6587abc\u4E2D") == Pieces{"\u4E2D\u6587", "abc", "\u4E2D"});
  CHECK(Split("a\u4E2DB") == Pieces{"a", "\u4E2D", "B"});
  CHECK(Split(" \u4E2D") == Pieces{" ", "\u4E2D"});
  CHECK(Split("\u3042\u4E2D\u30A2") == Pieces{"\u3042", "\u4E2D", "\u30A2"});
  // Number and mark characters of the Han script, and one that merely is used with it (U+3001).
  CHECK(Split("\u3007\u3021\u4E00") == Pieces{"\u3007\u3021\u4E00"});
  CHECK(Split("\u4E2D\u3001\u4E2D") == Pieces{"\u4E2D", "\u3001", "\u4E2D"});
}

TEST_CASE("split pattern: digits, punctuation, spaces") {
  CHECK(Split("1234567") == Pieces{"123", "456", "7"});
  CHECK(Split("x12") == Pieces{"x", "12"});
  CHECK(Split("a, b!!\n\nc") == Pieces{"a", ",", " b", "!!\n\n", "c"});
  CHECK(Split(" ...x") == Pieces{" ...", "x"});
  CHECK(Split("a   b") == Pieces{"a", "  ", " b"});
  CHECK(Split("a   ") == Pieces{"a", "   "});
  CHECK(Split("a  \n  b") == Pieces{"a", "  \n", " ", " b"});
  CHECK(Split("\r\n\r\n x") == Pieces{"\r\n\r\n", " x"});
  CHECK(Split("a\u00A0\u3000 b") == Pieces{"a", "\u00A0\u3000", " b"});
  // U+180E is no white space; U+0085 is.
  CHECK(Split("  \u180E") == Pieces{" ", " \u180E"});
  CHECK(Split(" \u0085") == Pieces{" \u0085"});
}

TEST_CASE("split pattern: the pieces are the text") {
  std::mt19937 random(4);
  for (int round = 0; round < 200; ++round) {
    const std::string text = RandomText(random, random() % 500);
    std::string together;
    for (const std::string& piece : Split(text)) {
      CHECK_FALSE(piece.empty());
      together += piece;
    }
    CHECK(together == text);
  }
}

}  // namespace
}  // namespace kdt
