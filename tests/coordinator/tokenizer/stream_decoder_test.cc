#include "coordinator/tokenizer/stream_decoder.h"

#include "common/utf8.h"
#include "tests/coordinator/tokenizer/golden_tokenizer.h"

namespace kdt {
namespace {

TEST_CASE("stream decoder: a character waits for its last byte") {
  StreamDecoder decoder(GoldenTokenizer(), false);
  CHECK(decoder.Push('a').value() == "a");
  CHECK(decoder.Push(0xF0).value() == "");
  CHECK(decoder.Push(0x9F).value() == "");
  CHECK(decoder.Push(0x98).value() == "");
  CHECK(decoder.Push(0x80).value() == "\U0001F600");
  CHECK(decoder.Push(0xE4).value() == "");
  CHECK(decoder.Push('b').value() ==
        "\uFFFD"
        "b");
  CHECK(decoder.Flush() == "");
  CHECK(decoder.Push(0xE4).value() == "");
  CHECK(decoder.Push(0xB8).value() == "");
  CHECK(decoder.Flush() == "\uFFFD");
  CHECK(decoder.Flush() == "");
}

TEST_CASE("stream decoder: a bad id changes nothing") {
  StreamDecoder decoder(GoldenTokenizer(), false);
  CHECK(decoder.Push(0xE4).value() == "");
  const std::vector<uint32_t> ids = {0xB8, 5000};
  CHECK(decoder.Push(ids).status().code() == absl::StatusCode::kInvalidArgument);
  CHECK(decoder.Push(0xB8).value() == "");
  CHECK(decoder.Push(0xAD).value() == "\u4E2D");
}

TEST_CASE("stream decoder: any ids in any pieces give what Decode gives") {
  const auto tokenizer = GoldenTokenizer();
  std::mt19937 random(6);
  for (int round = 0; round < 400; ++round) {
    const bool skip_special = round % 2 == 0;
    std::vector<uint32_t> ids;
    if (round % 4 < 2) {
      ids = tokenizer->Encode(RandomText(random, 60), false).value();
    } else {
      // Mostly bytes above 127: characters broken in every way.
      while (ids.size() < 80) ids.push_back(random() % 4 == 0 ? random() % 1024 : 0x80 + random() % 0x80);
    }
    StreamDecoder decoder(tokenizer, skip_special);
    std::string text;
    for (size_t at = 0; at < ids.size();) {
      const size_t count = std::min<size_t>(random() % 4, ids.size() - at);
      const auto piece = decoder.Push(std::span(ids).subspan(at, count));
      REQUIRE(piece.ok());
      REQUIRE(FirstInvalidUtf8(*piece) == std::nullopt);
      text += *piece;
      at += count;
    }
    text += decoder.Flush();
    CHECK(text == tokenizer->Decode(ids, skip_special).value());
  }
}

}  // namespace
}  // namespace kdt
