// The goldens' tokenizer (768 ranks, 256 reserved ids), loaded once, and random text for tests.
#pragma once

#include <memory>
#include <random>
#include <string>

#include "coordinator/tokenizer/tokenizer.h"
#include "tests/support/catch.h"
#include "tests/support/code_points.h"

namespace kdt {

inline std::shared_ptr<const Tokenizer> GoldenTokenizer() {
  static const auto tokenizer = Tokenizer::Load(KDT_GOLDENS_DIR "/model");
  REQUIRE(tokenizer.ok());
  return *tokenizer;
}

// Words, spaces, line breaks, digits, punctuation, Han and anything else that Unicode has.
inline std::string RandomText(std::mt19937& random, size_t characters) {
  std::string text;
  for (size_t i = 0; i < characters; ++i) {
    char32_t c = 0;
    switch (random() % 8) {
      case 0:
      case 1:
        c = 'a' + random() % 26;
        break;
      case 2:
        c = 'A' + random() % 26;
        break;
      case 3:
        c = random() % 128;
        break;
      case 4:
        c = U" \t\n\r'"[random() % 5];
        break;
      case 5:
        c = 0x4E00 + random() % 0x5000;
        break;
      case 6:
        c = random() % 0x3000;
        break;
      default:
        c = random() % 0x110000;
    }
    if (c >= 0xD800 && c < 0xE000) c = 'x';
    AppendCodePoint(c, &text);
  }
  return text;
}

}  // namespace kdt
