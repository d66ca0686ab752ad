#include "common/utf8.h"

#include <cstring>

#include "common/status.h"

namespace kdt {
namespace {

// The leading ASCII bytes, eight at a time: most text is ASCII.
size_t AsciiPrefix(std::string_view bytes) {
  size_t i = 0;
  for (; i + 8 <= bytes.size(); i += 8) {
    uint64_t word;
    std::memcpy(&word, bytes.data() + i, 8);
    if (word & 0x8080808080808080u) break;
  }
  while (i < bytes.size() && static_cast<unsigned char>(bytes[i]) < 0x80) ++i;
  return i;
}

// Length of the whole characters at the start.
size_t ValidPrefix(std::string_view bytes) {
  size_t i = 0;
  while (true) {
    i += AsciiPrefix(bytes.substr(i));
    if (i == bytes.size()) return i;
    const Utf8Unit unit = NextUtf8(bytes.substr(i));
    if (unit.kind != Utf8Unit::kCharacter) return i;
    i += unit.length;
  }
}

}  // namespace

Utf8Unit NextUtf8(std::string_view bytes) {
  KDT_CHECK(!bytes.empty());
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(bytes[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {Utf8Unit::kCharacter, 1, lead};
  if (lead < 0xC2 || lead > 0xF4) return {Utf8Unit::kBroken, 1, 0};
  const size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // The second byte's range excludes overlong forms, surrogates and what lies above U+10FFFF.
  const unsigned low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const unsigned high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  char32_t code = lead & (0xFFu >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    if (i == bytes.size()) return {Utf8Unit::kIncomplete, static_cast<uint8_t>(i), 0};
    const unsigned next = byte(i);
    if (next < (i == 1 ? low : 0x80) || next > (i == 1 ? high : 0xBF)) {
      return {Utf8Unit::kBroken, static_cast<uint8_t>(i), 0};
    }
    code = code << 6 | (next & 0x3F);
  }
  return {Utf8Unit::kCharacter, static_cast<uint8_t>(length), code};
}

std::optional<size_t> FirstInvalidUtf8(std::string_view bytes) {
  const size_t valid = ValidPrefix(bytes);
  if (valid == bytes.size()) return std::nullopt;
  return valid;
}

size_t AppendUtf8(std::string_view bytes, std::string* text) {
  size_t taken = 0;
  while (true) {
    const size_t valid = ValidPrefix(bytes.substr(taken));
    text->append(bytes.substr(taken, valid));
    taken += valid;
    if (taken == bytes.size()) return taken;
    const Utf8Unit unit = NextUtf8(bytes.substr(taken));
    if (unit.kind == Utf8Unit::kIncomplete) return taken;
    text->append(kReplacementCharacter);
    taken += unit.length;
  }
}

std::string Utf8Text(std::string_view bytes) {
  std::string text;
  if (AppendUtf8(bytes, &text) < bytes.size()) text.append(kReplacementCharacter);
  return text;
}

}  // namespace kdt
