#include "common/json_fault.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/utf8.h"

namespace kdt {
namespace {

constexpr size_t kMostFound = 32;  // bytes of a word that are shown
constexpr absl::string_view kByteOrderMark = "\xEF\xBB\xBF";

enum class Next { kValue, kValueOrEnd, kName, kNameOrEnd, kColon, kCommaOrEnd, kNothing };

bool IsBlank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

// -12.5e3, as far as grammar goes.
bool IsNumber(absl::string_view word) {
  const auto digits = [&word] {
    size_t count = 0;
    while (count < word.size() && absl::ascii_isdigit(static_cast<unsigned char>(word[count]))) ++count;
    word.remove_prefix(count);
    return count;
  };
  absl::ConsumePrefix(&word, "-");
  if (!absl::ConsumePrefix(&word, "0") && digits() == 0) return false;
  if (absl::ConsumePrefix(&word, ".") && digits() == 0) return false;
  if (!absl::ConsumePrefix(&word, "e") && !absl::ConsumePrefix(&word, "E")) return word.empty();
  if (!absl::ConsumePrefix(&word, "+")) absl::ConsumePrefix(&word, "-");
  return digits() > 0 && word.empty();
}

class Scanner {
 public:
  explicit Scanner(absl::string_view text) : text_(text) {
    if (absl::StartsWith(text_, kByteOrderMark)) at_ = kByteOrderMark.size();
  }
  std::string Run();

 private:
  bool Step();  // false: the text is over, or has a fault
  bool Value(char c);
  bool Word();
  bool String();
  bool Escape();
  void Open(char bracket, Next next);
  bool Close();
  std::string Expected() const;
  std::string Found() const;
  bool Fail(absl::string_view what) { return Fail(what, at_); }
  bool Fail(absl::string_view what, size_t at);
  std::optional<uint32_t> Hex4(size_t at) const;

  const absl::string_view text_;
  size_t at_ = 0;
  std::string open_;  // brackets
  Next next_ = Next::kValue;
  std::string fault_;
};

std::string Scanner::Run() {
  while (Step()) {
  }
  return fault_;
}

bool Scanner::Fail(absl::string_view what, size_t at) {
  const absl::string_view before = text_.substr(0, at);
  const size_t line_begin = before.rfind('\n') == absl::string_view::npos ? 0 : before.rfind('\n') + 1;
  const auto lines = std::count(before.begin(), before.end(), '\n');
  const auto columns = std::count_if(before.begin() + static_cast<std::ptrdiff_t>(line_begin), before.end(),
                                     [](char c) { return (c & 0xc0) != 0x80; });
  fault_ = absl::StrCat("line ", lines + 1, ", column ", columns + 1, ": ", what);
  return false;
}

std::string Scanner::Expected() const {
  const std::string end = open_.empty() ? "" : open_.back() == '{' ? "'}'" : "']'";
  switch (next_) {
    case Next::kValue:
      return "a value";
    case Next::kValueOrEnd:
      return "a value or ']'";
    case Next::kName:
      return "a field's name in double quotes";
    case Next::kNameOrEnd:
      return "a field's name in double quotes or '}'";
    case Next::kColon:
      return "':' behind a field's name";
    case Next::kCommaOrEnd:
      return absl::StrCat("',' or ", end);
    case Next::kNothing:
      return "the end of the text";
  }
  return "";
}

std::string Scanner::Found() const {
  if (at_ >= text_.size()) return "the end of the text";
  size_t end = at_;
  while (end < text_.size() && end - at_ < kMostFound &&
         absl::ascii_isalnum(static_cast<unsigned char>(text_[end])))
    ++end;
  if (end > at_) return absl::StrCat("\"", text_.substr(at_, end - at_), "\"");
  if (absl::ascii_isprint(static_cast<unsigned char>(text_[at_])))
    return absl::StrCat("'", text_.substr(at_, 1), "'");
  return absl::StrCat("the byte 0x", absl::Hex(static_cast<unsigned char>(text_[at_]), absl::kZeroPad2));
}

bool Scanner::Step() {
  while (at_ < text_.size() && IsBlank(text_[at_])) ++at_;
  const auto unexpected = [this] { return Fail(absl::StrCat("expected ", Expected(), ", found ", Found())); };
  if (at_ == text_.size()) return next_ == Next::kNothing ? false : unexpected();
  const char c = text_[at_];
  const bool closes =
      (c == '}' && (next_ == Next::kNameOrEnd || (next_ == Next::kCommaOrEnd && open_.back() == '{'))) ||
      (c == ']' && (next_ == Next::kValueOrEnd || (next_ == Next::kCommaOrEnd && open_.back() == '[')));
  if (closes) return Close();
  switch (next_) {
    case Next::kValue:
    case Next::kValueOrEnd:
      return Value(c) || (fault_.empty() && unexpected());
    case Next::kName:
    case Next::kNameOrEnd:
      if (c != '"') return unexpected();
      if (!String()) return false;
      next_ = Next::kColon;
      return true;
    case Next::kColon:
      if (c != ':') return unexpected();
      ++at_;
      next_ = Next::kValue;
      return true;
    case Next::kCommaOrEnd:
      if (c != ',') return unexpected();
      ++at_;
      next_ = open_.back() == '{' ? Next::kName : Next::kValue;
      return true;
    case Next::kNothing:
      return unexpected();
  }
  return false;
}

void Scanner::Open(char bracket, Next next) {
  ++at_;
  open_.push_back(bracket);
  next_ = next;
}

bool Scanner::Close() {
  ++at_;
  open_.pop_back();
  next_ = open_.empty() ? Next::kNothing : Next::kCommaOrEnd;
  return true;
}

bool Scanner::Value(char c) {
  if (c == '{') {
    Open(c, Next::kNameOrEnd);
    return true;
  }
  if (c == '[') {
    Open(c, Next::kValueOrEnd);
    return true;
  }
  if (!(c == '"' ? String() : Word())) return false;
  next_ = open_.empty() ? Next::kNothing : Next::kCommaOrEnd;
  return true;
}

bool Scanner::Word() {
  size_t end = at_;
  while (end < text_.size() && !IsBlank(text_[end]) && !absl::StrContains(",:[]{}\"", text_[end])) ++end;
  const absl::string_view word = text_.substr(at_, end - at_);
  if (IsNumber(word)) {
    double number = 0;
    if (!absl::SimpleAtod(word, &number) || !std::isfinite(number)) return Fail("the number is too large");
  } else if (word != "true" && word != "false" && word != "null") {
    return false;
  }
  at_ = end;
  return true;
}

std::optional<uint32_t> Scanner::Hex4(size_t at) const {
  const absl::string_view digits = text_.substr(std::min(at, text_.size()), 4);
  const bool all = std::all_of(digits.begin(), digits.end(),
                               [](char c) { return absl::ascii_isxdigit(static_cast<unsigned char>(c)); });
  uint32_t value = 0;
  if (digits.size() < 4 || !all || !absl::SimpleHexAtoi(digits, &value)) return std::nullopt;
  return value;
}

// At a backslash.
bool Scanner::Escape() {
  const char c = at_ + 1 < text_.size() ? text_[at_ + 1] : '\0';
  if (c != 'u') {
    if (c == '\0' || !absl::StrContains("\"\\/bfnrt", c))
      return Fail("the backslash begins no escape that JSON has");
    at_ += 2;
    return true;
  }
  const auto code = Hex4(at_ + 2);
  if (!code.has_value()) return Fail("expected four hexadecimal digits behind \\u");
  const bool high = *code >= 0xd800 && *code < 0xdc00, low = *code >= 0xdc00 && *code < 0xe000;
  const auto other = high && text_.substr(at_ + 6, 2) == "\\u" ? Hex4(at_ + 8) : std::nullopt;
  if (low || (high && (!other.has_value() || *other < 0xdc00 || *other >= 0xe000))) {
    return Fail("half of a surrogate pair");
  }
  at_ += high ? 12 : 6;
  return true;
}

bool Scanner::String() {
  const size_t begin = at_++;
  while (at_ < text_.size() && text_[at_] != '"') {
    const auto c = static_cast<unsigned char>(text_[at_]);
    if (c < 0x20) return Fail("a control character in a text must be escaped");
    if (c == '\\') {
      if (!Escape()) return false;
    } else {
      const Utf8Unit unit = NextUtf8({text_.data() + at_, text_.size() - at_});
      if (unit.kind != Utf8Unit::kCharacter) return Fail("a text is not UTF-8");
      at_ += unit.length;
    }
  }
  if (at_ >= text_.size()) return Fail("a text begins that does not end", begin);
  ++at_;
  return true;
}

}  // namespace

std::string JsonFault(absl::string_view text) { return Scanner(text).Run(); }

absl::StatusOr<nlohmann::json> ParseJson(absl::string_view text, absl::string_view name,
                                         const nlohmann::json::parser_callback_t& watch) {
  auto json = nlohmann::json::parse(text, watch, /*allow_exceptions=*/false);
  if (!json.is_discarded()) return json;
  return absl::InvalidArgumentError(absl::StrCat(name, ": not valid JSON: ", JsonFault(text)));
}

}  // namespace kdt
