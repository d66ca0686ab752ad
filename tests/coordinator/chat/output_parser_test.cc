#include "coordinator/chat/output_parser.h"

#include "common/utf8.h"
#include "tests/coordinator/tokenizer/golden_tokenizer.h"

namespace kdt {
namespace {

constexpr char kSection[] = "<|tool_calls_section_begin|>";
constexpr char kSectionEnd[] = "<|tool_calls_section_end|>";
constexpr char kCall[] = "<|tool_call_begin|>";
constexpr char kArguments[] = "<|tool_call_argument_begin|>";
constexpr char kCallEnd[] = "<|tool_call_end|>";

ChatOutputParser Parser(bool reasoning_open, bool skip_special = false) {
  const auto tokenizer = GoldenTokenizer();
  return ChatOutputParser(tokenizer, ControlTokens::Find(*tokenizer).value(), reasoning_open, skip_special);
}

void Add(const ChatDelta& delta, ChatDelta* all) {
  CHECK(FirstInvalidUtf8(delta.reasoning) == std::nullopt);
  CHECK(FirstInvalidUtf8(delta.content) == std::nullopt);
  all->reasoning += delta.reasoning;
  all->content += delta.content;
  all->tool_calls.insert(all->tool_calls.end(), delta.tool_calls.begin(), delta.tool_calls.end());
}

// Everything an answer comes apart into, its tags written by name; one token at a time.
ChatDelta Parse(const std::string& answer, bool reasoning_open = true, bool skip_special = false) {
  ChatOutputParser parser = Parser(reasoning_open, skip_special);
  ChatDelta all;
  const std::vector<uint32_t> ids = GoldenTokenizer()->Encode(answer, true).value();
  for (const uint32_t id : ids) Add(parser.Push(id).value(), &all);
  Add(parser.Flush(), &all);
  CHECK(parser.tool_calls() == all.tool_calls.size());
  return all;
}

std::string Call(const std::string& id, const std::string& arguments) {
  std::string text = kCall;
  text += id;
  text += kArguments;
  text += arguments;
  text += kCallEnd;
  return text;
}

TEST_CASE("output parser: reasoning and content") {
  ChatDelta all = Parse("I wonder</think>It is \u6771\u4EAC.");
  CHECK(all.reasoning == "I wonder");
  CHECK(all.content == "It is \u6771\u4EAC.");
  all = Parse("just text", false);
  CHECK(all.reasoning == "");
  CHECK(all.content == "just text");
  // A model that opens its reasoning by itself, or a second time.
  all = Parse("<think>hm</think>x", false);
  CHECK(all.reasoning == "hm");
  CHECK(all.content == "x");
  all = Parse("<think>hm</think>x</think>y", true);
  CHECK(all.reasoning == "hm");
  CHECK(all.content == "xy");
  // Cut off while reasoning.
  all = Parse("never done");
  CHECK(all.reasoning == "never done");
  CHECK(all.content == "");
}

TEST_CASE("output parser: reasoning tokens are counted without the tags") {
  ChatOutputParser parser = Parser(true);
  const auto tokenizer = GoldenTokenizer();
  const size_t expected = tokenizer->Encode("some thoughts", false).value().size();
  REQUIRE(parser.Push(tokenizer->Encode("some thoughts</think>and text", true).value()).ok());
  CHECK(parser.reasoning_tokens() == expected);
}

TEST_CASE("output parser: tool calls") {
  ChatDelta all = Parse("need tools</think>Let me see." + std::string(kSection) +
                        Call("functions.get_weather:0", "{\"city\": \"\u00DE\u00F3rsh\u00F6fn\"}") + "\n" +
                        Call(" functions.list.all:12\n", " ") + kSectionEnd);
  CHECK(all.reasoning == "need tools");
  CHECK(all.content == "Let me see.");
  REQUIRE(all.tool_calls.size() == 2);
  CHECK(all.tool_calls[0].id == "functions.get_weather:0");
  CHECK(all.tool_calls[0].name == "get_weather");
  CHECK(all.tool_calls[0].arguments_json == "{\"city\": \"\u00DE\u00F3rsh\u00F6fn\"}");
  CHECK(all.tool_calls[1].id == "functions.list.all:12");
  CHECK(all.tool_calls[1].name == "list.all");
  CHECK(all.tool_calls[1].arguments_json == "{}");
}

TEST_CASE("output parser: a tool section ends open reasoning") {
  ChatDelta all = Parse("think" + std::string(kSection) + Call("functions.f:0", "{}") + kSectionEnd + "done");
  CHECK(all.reasoning == "think");
  CHECK(all.tool_calls.size() == 1);
  CHECK(all.content == "done");
  // Without the section's own tags, too.
  all = Parse("think" + Call("f:3", "{}") + "then</think>text");
  CHECK(all.reasoning == "think");
  REQUIRE(all.tool_calls.size() == 1);
  CHECK(all.tool_calls[0].name == "f");
  CHECK(all.content == "thentext");
}

TEST_CASE("output parser: a call is delivered as soon as it is complete") {
  ChatOutputParser parser = Parser(false);
  const auto tokenizer = GoldenTokenizer();
  const auto push = [&](const std::string& text) {
    return parser.Push(tokenizer->Encode(text, true).value()).value();
  };
  CHECK(push(std::string(kSection) + kCall + "functions.f:0" + kArguments + "{\"a\":1").empty());
  const ChatDelta delta = push(std::string("}") + kCallEnd);
  CHECK(delta.tool_calls.size() == 1);
  CHECK(parser.Flush().empty());
}

TEST_CASE("output parser: what is broken comes out as content") {
  const std::string section = kSection;
  const std::string good = Call("functions.f:1", "{\"a\": 2}");
  const std::string broken[] = {
      Call("functions.f", "{}"),                        // no index
      Call("functions.f:x", "{}"),                      // no number
      Call("functions.:0", "{}"),                       // no name
      Call("two words:0", "{}"),                        //
      Call("", "{}"),                                   //
      Call("functions.f:0", "{\"a\": "),                // no JSON
      Call("functions.f:0", "[1]"),                     // no object
      Call("functions.f:0", "{}<think>"),               //
      std::string(kCall) + "functions.f:0" + kCallEnd,  // no arguments
      std::string(kCall) + "functions.f:0" + kArguments + "{}" + kArguments + "{}" + kCallEnd,
      std::string(kCallEnd),
      std::string(kArguments),
      "loose text",
  };
  for (const std::string& part : broken) {
    INFO(part);
    // Between good calls, at the section's end, and alone.
    ChatDelta all = Parse("r</think>" + section + good + part + good + kSectionEnd + "z");
    CHECK(all.content == part + "z");
    CHECK(all.tool_calls.size() == 2);
    all = Parse(section + part + kSectionEnd + "z");
    CHECK(all.content == part + "z");
    CHECK(all.tool_calls.empty());
    all = Parse(section + part);
    CHECK(all.content == part);
  }
  // Unfinished calls: at the end of the answer, of the section, before another call or section.
  for (const std::string& part : {std::string(kCall), std::string(kCall) + "functions.f",
                                  std::string(kCall) + "functions.f:0" + kArguments,
                                  std::string(kCall) + "functions.f:0" + kArguments + "{\"city\": \"Os"}) {
    INFO(part);
    CHECK(Parse(section + part).content == part);
    CHECK(Parse(part).content == part);
    CHECK(Parse(section + part + kSectionEnd + "z").content == part + "z");
    CHECK(Parse(section + part + section + "z").content == part + "z");
    const ChatDelta all = Parse(section + part + good);
    CHECK(all.content == part);
    CHECK(all.tool_calls.size() == 1);
  }
  // Tags and white space alone say nothing.
  CHECK(Parse(section + " \n" + kSectionEnd).empty());
  CHECK(Parse(kSectionEnd).empty());
}

TEST_CASE("output parser: characters are never split, also at tags") {
  const auto tokenizer = GoldenTokenizer();
  const uint32_t think_end = tokenizer->SpecialId("</think>").value();
  ChatOutputParser parser = Parser(true);
  CHECK(parser.Push(0xE4).value().empty());
  const ChatDelta delta = parser.Push(think_end).value();
  CHECK(delta.reasoning == "\uFFFD");
  CHECK(parser.Push(0xE4).value().empty());
  CHECK(parser.Push(0xB8).value().empty());
  CHECK(parser.Push(0xAD).value().content == "\u4E2D");
  CHECK(parser.Push(0xF0).value().empty());
  CHECK(parser.Flush().content == "\uFFFD");
}

TEST_CASE("output parser: other control tokens") {
  CHECK(Parse("a<|im_user|>b", false, false).content == "a<|im_user|>b");
  CHECK(Parse("a<|im_user|>b", false, true).content == "ab");
  const auto status = Parser(false).Push(4096).status();
  CHECK(status.code() == absl::StatusCode::kInvalidArgument);
  CHECK(std::string(status.message()).find("4096") != std::string::npos);
}

TEST_CASE("output parser: any ids at all") {
  std::mt19937 random(8);
  const auto tokenizer = GoldenTokenizer();
  for (int round = 0; round < 300; ++round) {
    ChatOutputParser parser = Parser(round % 2 == 0, round % 3 == 0);
    std::vector<uint32_t> ids;
    // Mostly the format's tags (779..791), broken bytes and text.
    while (ids.size() < 60) {
      ids.push_back(random() % 3 == 0 ? 779 + random() % 13
                    : random() % 2    ? 0x80 + random() % 0x80
                                      : random() % 768);
    }
    ChatDelta by_token;
    for (const uint32_t id : ids) Add(parser.Push(id).value(), &by_token);
    Add(parser.Flush(), &by_token);
    ChatOutputParser whole = Parser(round % 2 == 0, round % 3 == 0);
    ChatDelta at_once;
    Add(whole.Push(ids).value(), &at_once);
    Add(whole.Flush(), &at_once);
    CHECK(by_token.reasoning == at_once.reasoning);
    CHECK(by_token.content == at_once.content);
    CHECK(whole.reasoning_tokens() == parser.reasoning_tokens());
  }
}

}  // namespace
}  // namespace kdt
