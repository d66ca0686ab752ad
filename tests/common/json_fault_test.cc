#include "common/json_fault.h"

#include <random>

#include "nlohmann/json.hpp"
#include "tests/common/support.h"
#include "tests/support/catch.h"

namespace kdt {
namespace {

TEST_CASE("JSON faults are told by place, what was expected, and what stands there") {
  CHECK(JsonFault("") == "line 1, column 1: expected a value, found the end of the text");
  CHECK(JsonFault("{\n  \"a\" 1}") == "line 2, column 7: expected ':' behind a field's name, found \"1\"");
  CHECK(JsonFault("{\"a\": 1\n\"b\": 2}") == "line 2, column 1: expected ',' or '}', found '\"'");
  CHECK(JsonFault("{\"a\": 1,}") == "line 1, column 9: expected a field's name in double quotes, found '}'");
  CHECK(JsonFault("[1, 2,]") == "line 1, column 7: expected a value, found ']'");
  CHECK(JsonFault("[1") == "line 1, column 3: expected ',' or ']', found the end of the text");
  CHECK(JsonFault("[True]") == "line 1, column 2: expected a value or ']', found \"True\"");
  CHECK(JsonFault("{} {}") == "line 1, column 4: expected the end of the text, found '{'");
  CHECK(JsonFault("\"ab") == "line 1, column 1: a text begins that does not end");
  CHECK(JsonFault("[\"\xC3\xA9\", x]") == "line 1, column 7: expected a value, found \"x\"");  // characters
  CHECK(JsonFault("[\"a\xFF\"]") == "line 1, column 4: a text is not UTF-8");
  CHECK(JsonFault("\"a\tb\"") == "line 1, column 3: a control character in a text must be escaped");
  CHECK(JsonFault("\"\\x\"") == "line 1, column 2: the backslash begins no escape that JSON has");
  CHECK(JsonFault("\"\\u12g4\"") == "line 1, column 2: expected four hexadecimal digits behind \\u");
  CHECK(JsonFault("\"\\ud800\"") == "line 1, column 2: half of a surrogate pair");
  CHECK(JsonFault("\xC0") == "line 1, column 1: expected a value, found the byte 0xc0");
  CHECK(JsonFault("\xEF\xBB\xBF{}").empty());
  CHECK(JsonFault(R"([-0.5e+3, 0, 1E9, "\u00e9\ud83d\ude00\/", true, false, null, {}, []])").empty());
}

// A few bytes of a valid text changed: both agree on what is left of it.
TEST_CASE("JSON faults are found where the parser finds one, and nowhere else") {
  const std::string whole = R"({"a":[1,-2.5e3,true,null],"b":{"c":"x\u00e9\"\ud83d\ude00","d":{}},"e":"\t)"
                            "\xC3\xA9"
                            R"(","f":[[],[{}]]})";
  std::mt19937 random(1);
  const std::string pool = "{}[]\",:\\ue0129-+. \n\tntx\xC3\xA9\xFF\x01";
  const auto pick = [&](size_t size) { return std::uniform_int_distribution<size_t>(0, size - 1)(random); };
  int faults = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string text = whole;
    for (size_t i = 0; i <= pick(3); ++i) {
      const size_t at = pick(text.size());
      if (pick(3) == 0) {
        text.erase(at, 1);
      } else if (pick(2) == 0) {
        text[at] = pool[pick(pool.size())];
      } else {
        text.insert(at, 1, pool[pick(pool.size())]);
      }
    }
    const bool valid = nlohmann::json::accept(text);
    faults += !valid;
    if (JsonFault(text).empty() == valid) continue;
    INFO(text << "\n" << JsonFault(text));
    CHECK(JsonFault(text).empty() == valid);
  }
  CHECK(faults > 1000);
  CHECK(faults < 20000);
}

}  // namespace
}  // namespace kdt
