// UTF-8 as Unicode defines it: no surrogates, no overlong forms, nothing above U+10FFFF.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kdt {

// What stands at the start of some bytes.
struct Utf8Unit {
  enum Kind : uint8_t {
    kCharacter,   // one whole character
    kBroken,      // bytes that no character begins with; `length` is the maximal broken part (one U+FFFD)
    kIncomplete,  // the bytes end inside a character that is right so far
  };
  Kind kind;
  uint8_t length;  // bytes, 1..4
  char32_t code;   // of a whole character, else 0
};

// `bytes` must not be empty.
Utf8Unit NextUtf8(std::string_view bytes);

// Offset of the first byte that is not part of a whole character; nullopt when all is well.
std::optional<size_t> FirstInvalidUtf8(std::string_view bytes);

// Appends `bytes` to *text with each broken part replaced by U+FFFD, up to a character that is incomplete at
// the end. Returns the number of bytes taken; at most three remain.
size_t AppendUtf8(std::string_view bytes, std::string* text);

// `bytes` with each broken part replaced by U+FFFD, an incomplete end too: for a text from outside (a path)
// that goes into a protobuf string, since a message with any other bytes cannot be read.
std::string Utf8Text(std::string_view bytes);

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

}  // namespace kdt
