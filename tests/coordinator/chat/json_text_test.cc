#include "coordinator/chat/json_text.h"

#include "tests/support/catch.h"

namespace kdt {
namespace {

std::string Error(const std::string& text) {
  const auto compact = CompactJsonObject(text);
  CHECK(compact.status().code() == absl::StatusCode::kInvalidArgument);
  return std::string(compact.status().message());
}

TEST_CASE("json text: compact, in the given order") {
  CHECK(CompactJsonObject("{ \"b\" : [ 1 , 2.5, true , null ] ,\n \"a\" : { } }").value() ==
        R"({"b":[1,2.5,true,null],"a":{}})");
  CHECK(CompactJsonObject(R"({"u":"\u00e9\u6771\/\n\u0001","s":" a b "})").value() ==
        "{\"u\":\"\u00E9\u6771/\\n\\u0001\",\"s\":\" a b \"}");
}

TEST_CASE("json text: anything but one object is refused") {
  CHECK(Error("[1]") == "must be a JSON object");
  CHECK(Error("\"x\"") == "must be a JSON object");
  CHECK(Error("").find("is not valid JSON") == 0);
  CHECK(Error("{\"a\":1} {}").find("is not valid JSON") == 0);
  CHECK(Error("{'a':1}") ==
        "is not valid JSON: line 1, column 2: expected a field's name in double quotes or '}', found '''");
  CHECK(Error("{\"a\":NaN}").find("is not valid JSON") == 0);
  CHECK(Error("{\"a\":\"\xFF\"}").find("is not valid JSON") == 0);
  CHECK(Error(R"({"a":{"x":1,"x":2}})") == "has the key \"x\" twice");
  CHECK(CompactJsonObject(R"({"a":{"x":1},"b":{"x":2}})").ok());
}

TEST_CASE("json text: depth is limited") {
  const auto nested = [](int levels) {
    std::string text = "{\"a\":";
    for (int i = 1; i < levels; ++i) text += "[";
    text += "1";
    for (int i = 1; i < levels; ++i) text += "]";
    return text + "}";
  };
  CHECK(CompactJsonObject(nested(60)).ok());
  CHECK(Error(nested(70)) == "has more than 64 levels");
  CHECK(Error(nested(1'000'000)) == "has more than 64 levels");
  CHECK(IsJsonObject(nested(1'000'000)));
}

TEST_CASE("json text: objects are recognised") {
  CHECK(IsJsonObject("{}"));
  CHECK(IsJsonObject(" {\"a\": [1]} \n"));
  CHECK_FALSE(IsJsonObject(""));
  CHECK_FALSE(IsJsonObject("  "));
  CHECK_FALSE(IsJsonObject("[]"));
  CHECK_FALSE(IsJsonObject("{"));
  CHECK_FALSE(IsJsonObject("{\"a\": }"));
}

}  // namespace
}  // namespace kdt
