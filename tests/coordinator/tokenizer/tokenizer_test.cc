#include "coordinator/tokenizer/tokenizer.h"

#include <fstream>
#include <thread>

#include "nlohmann/json.hpp"
#include "tests/coordinator/tokenizer/golden_tokenizer.h"

namespace kdt {
namespace {

using Ids = std::vector<uint32_t>;

TEST_CASE("tokenizer: goldens, with control tokens parsed and as ordinary text") {
  const auto tokenizer = GoldenTokenizer();
  std::ifstream file(KDT_GOLDENS_DIR "/tokenizer.json");
  const auto goldens = nlohmann::json::parse(file);
  REQUIRE(goldens["cases"].size() >= 40);
  for (const auto& golden : goldens["cases"]) {
    const auto text = golden["text"].get<std::string>();
    INFO(text);
    const auto special = tokenizer->Encode(text, true);
    const auto ordinary = tokenizer->Encode(text, false);
    REQUIRE(special.ok());
    REQUIRE(ordinary.ok());
    CHECK(*special == golden["special"].get<Ids>());
    CHECK(*ordinary == golden["ordinary"].get<Ids>());
    CHECK(tokenizer->Decode(*special, false).value() == text);
    CHECK(tokenizer->Decode(*ordinary, false).value() == text);
  }
}

TEST_CASE("tokenizer: any text comes back, and ordinary text never holds a control token") {
  const auto tokenizer = GoldenTokenizer();
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    std::string text = RandomText(random, 1 + random() % 200);
    if (round % 3 == 0) text += "<|im_end|>" + RandomText(random, 5) + "[EOS]<think>";
    const auto ids = tokenizer->Encode(text, false);
    REQUIRE(ids.ok());
    for (const uint32_t id : *ids) REQUIRE_FALSE(tokenizer->IsSpecial(id));
    CHECK(tokenizer->Decode(*ids, true).value() == text);
    const auto special = tokenizer->Encode(text, true);
    REQUIRE(special.ok());
    CHECK(tokenizer->Decode(*special, false).value() == text);
  }
}

TEST_CASE("tokenizer: control tokens") {
  const auto tokenizer = GoldenTokenizer();
  CHECK(tokenizer->vocab_size() == 1024);
  CHECK(tokenizer->SpecialId("<|im_end|>").value() == 770);
  CHECK(tokenizer->SpecialId("[PAD]").value() == 1023);
  CHECK(tokenizer->SpecialId("<|reserved_token_773|>").value() == 773);
  CHECK(tokenizer->SpecialId("<|im_").status().code() == absl::StatusCode::kNotFound);
  CHECK(tokenizer->SpecialId("x<|im_end|>").status().code() == absl::StatusCode::kNotFound);
  CHECK(tokenizer->SpecialId("<|im_nothing|>").status().message().find("<|im_nothing|>") !=
        std::string::npos);
  CHECK_FALSE(tokenizer->IsSpecial(767));
  CHECK(tokenizer->IsSpecial(768));
  CHECK(tokenizer->IsSpecial(1023));
  CHECK_FALSE(tokenizer->IsSpecial(1024));

  SECTION("the <think> and tool tags are control tokens, but stay in the text") {
    const Ids ids = {tokenizer->SpecialId("<think>").value(), 'x', tokenizer->SpecialId("</think>").value(),
                     tokenizer->SpecialId("<|im_end|>").value(), 773};
    CHECK(tokenizer->Decode(ids, false).value() == "<think>x</think><|im_end|><|reserved_token_773|>");
    CHECK(tokenizer->Decode(ids, true).value() == "<think>x</think>");
  }
  SECTION("names are found wherever they stand, the rest is ordinary") {
    Ids expected = tokenizer->Encode("[BO", false).value();
    expected.push_back(768);
    REQUIRE(tokenizer->EncodeTo("<|im_end|", false, &expected).ok());
    expected.push_back(770);
    REQUIRE(tokenizer->EncodeTo("|>", false, &expected).ok());
    CHECK(tokenizer->Encode("[BO[BOS]<|im_end|<|im_end|>|>", true).value() == expected);
  }
}

TEST_CASE("tokenizer: bad input is an error that says where") {
  const auto tokenizer = GoldenTokenizer();
  const auto message = [](const absl::Status& status) {
    CHECK(status.code() == absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  CHECK(message(tokenizer->Encode("abc\xFFzz", true).status()) == "text is not valid UTF-8 at byte 3");
  CHECK(message(tokenizer->Encode("ab\xE4\xB8", true).status()) == "text is not valid UTF-8 at byte 2");
  CHECK(message(tokenizer->Encode("\xED\xA0\x80", false).status()) == "text is not valid UTF-8 at byte 0");
  Ids ids = {1, 2};
  CHECK_FALSE(tokenizer->EncodeTo("good \xC0\x80", false, &ids).ok());
  CHECK(ids == Ids{1, 2});

  CHECK(message(tokenizer->Decode(Ids{1, 1024}, false).status()) ==
        "ids[1] is 1024, the vocabulary has 1024");
  CHECK(message(tokenizer->Decode(Ids{UINT32_MAX}, true).status()).find("4294967295") != std::string::npos);
  CHECK(message(tokenizer->TokenBytes(1024).status()).find("1024") != std::string::npos);
}

TEST_CASE("tokenizer: bytes that are no character become U+FFFD") {
  const auto tokenizer = GoldenTokenizer();
  CHECK(tokenizer->Decode(Ids{'a', 0xE4, 0xB8, 'b'}, false).value() == "a\uFFFDb");
  CHECK(tokenizer->Decode(Ids{0xFF, 0xFF}, false).value() == "\uFFFD\uFFFD");
  CHECK(tokenizer->Decode(Ids{0xE4, 0xB8}, false).value() == "\uFFFD");
  CHECK(tokenizer->Decode(Ids{0xE4, 0xB8, 0xAD}, false).value() == "\u4E2D");
}

TEST_CASE("tokenizer: a megabyte of anything") {
  const auto tokenizer = GoldenTokenizer();
  std::mt19937 random(2);
  std::string letters;
  while (letters.size() < 1'000'000) letters += static_cast<char>('a' + random() % 26);
  std::string han;
  while (han.size() < 1'000'000) AppendCodePoint(0x4E00 + random() % 0x5000, &han);
  std::string tags;
  while (tags.size() < 1'000'000) tags += "<|reserved_token_1";
  const std::string texts[] = {
      std::string(1'000'000, ' '),
      std::string(1'000'000, 'x'),
      std::string(1'000'000, 'X'),
      std::string(1'000'000, '\n'),
      std::string(1'000'000, '<'),
      std::string(1'000'000, '7'),
      letters,
      han,
      tags,
      RandomText(random, 400'000),
  };
  for (const std::string& text : texts) {
    for (const bool parse_special : {false, true}) {
      const auto ids = tokenizer->Encode(text, parse_special);
      REQUIRE(ids.ok());
      // Not CHECK(a == b): a failure would print megabytes.
      CHECK((tokenizer->Decode(*ids, false).value() == text));
    }
  }
}

TEST_CASE("tokenizer: many threads at once") {
  const auto tokenizer = GoldenTokenizer();
  std::mt19937 random(3);
  const std::string text = RandomText(random, 5000);
  const Ids expected = tokenizer->Encode(text, true).value();
  std::vector<Ids> results(4);
  std::vector<std::thread> threads;
  for (Ids& result : results) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) result = tokenizer->Encode(text, true).value();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Ids& result : results) CHECK(result == expected);
}

}  // namespace
}  // namespace kdt
