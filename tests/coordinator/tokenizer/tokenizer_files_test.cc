// What is wrong with a checkpoint's tokenizer files is said with file and line or field.
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "coordinator/tokenizer/tokenizer.h"
#include "nlohmann/json.hpp"
#include "tests/support/catch.h"

namespace kdt {
namespace {

std::string Line(const std::string& bytes, int rank) {
  return absl::StrCat(absl::Base64Escape(bytes), " ", rank, "\n");
}

// 256 single bytes and "ab".
TokenizerFiles SmallFiles() {
  TokenizerFiles files;
  for (int byte = 0; byte < 256; ++byte)
    files.tiktoken_model += Line(std::string(1, static_cast<char>(byte)), byte);
  files.tiktoken_model += Line("ab", 256);
  files.tokenizer_config = R"({"added_tokens_decoder": {"257": {"content": "[BOS]", "special": true}}})";
  files.config = R"({"vocab_size": 513})";
  files.name_prefix = "m/";
  return files;
}

std::string Error(const TokenizerFiles& files) {
  const auto tokenizer = Tokenizer::Parse(files);
  REQUIRE_FALSE(tokenizer.ok());
  CHECK(tokenizer.status().code() == absl::StatusCode::kInvalidArgument);
  return std::string(tokenizer.status().message());
}

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_CASE("tokenizer files: the small vocabulary is good") {
  TokenizerFiles files = SmallFiles();
  const auto tokenizer = Tokenizer::Parse(files);
  REQUIRE(tokenizer.ok());
  CHECK((*tokenizer)->vocab_size() == 513);
  CHECK((*tokenizer)->Encode("abab[BOS]", true).value() == std::vector<uint32_t>{256, 256, 257});
  CHECK((*tokenizer)->TokenBytes(258).value() == "<|reserved_token_258|>");

  files.config = R"({"text_config": {"vocab_size": 513}})";
  CHECK(Tokenizer::Parse(files).ok());
  // Windows line ends and a missing last one.
  files.tiktoken_model = absl::StrReplaceAll(files.tiktoken_model, {{"\n", "\r\n"}});
  files.tiktoken_model.resize(files.tiktoken_model.size() - 2);
  CHECK(Tokenizer::Parse(files).ok());
}

TEST_CASE("tokenizer files: faults of tiktoken.model name the line") {
  TokenizerFiles files = SmallFiles();
  std::string& ranks = files.tiktoken_model;
  SECTION("not base64") {
    ranks += "??? 257\n";
    CHECK(Error(files) == "m/tiktoken.model: line 258: the token is not base64");
  }
  SECTION("base64 with a space in it") {
    ranks += "YW I= 257\n";
    CHECK(Contains(Error(files), "line 258"));
  }
  SECTION("unpadded base64") {
    ranks += "YWM 257\n";
    CHECK(Contains(Error(files), "line 258: the token is not base64"));
  }
  SECTION("no rank") {
    ranks += "YWM=\n";
    CHECK(Contains(Error(files), "line 258: must be \"BASE64 RANK\""));
  }
  SECTION("a rank that is no number") {
    for (const char* rank : {"x", "-1", "1x", "", "+5", " 257", "99999999999999999999"}) {
      TokenizerFiles bad = files;
      absl::StrAppend(&bad.tiktoken_model, "YWM= ", rank, "\n");
      CHECK(Contains(Error(bad), "line 258: the rank is not a number"));
    }
  }
  SECTION("a rank beyond the number of lines") {
    ranks += Line("ac", 300);
    CHECK(Contains(Error(files), "line 258: rank 300 leaves a gap"));
  }
  SECTION("a rank twice") {
    ranks += Line("ac", 256);
    CHECK(Contains(Error(files), "line 258: rank 256 was given before"));
  }
  SECTION("a token twice") {
    ranks += Line("ab", 257);
    CHECK(Contains(Error(files), "line 258: the token is that of line 257 again"));
  }
  SECTION("an empty token") {
    ranks += " 257\n";
    CHECK(Contains(Error(files), "line 258"));
  }
  SECTION("an endless token") {
    ranks += Line(std::string(5000, 'x'), 257);
    CHECK(Contains(Error(files), "line 258: a token must have 1 to 1024 bytes"));
  }
  SECTION("an empty line in the middle") {
    ranks += "\n";
    ranks += Line("ac", 257);
    CHECK(Contains(Error(files), "line 258: is empty"));
  }
  SECTION("a single byte is missing") {
    ranks = ranks.substr(ranks.find('\n') + 1);
    for (int byte = 1; byte < 256; ++byte) {
      if (byte == 1) ranks.clear();
      ranks += Line(std::string(1, static_cast<char>(byte)), byte - 1);
    }
    CHECK(Contains(Error(files), "m/tiktoken.model: no token for the single byte 0"));
  }
  SECTION("nothing in it") {
    ranks.clear();
    CHECK(Error(files) == "m/tiktoken.model: holds no ranks");
  }
}

TEST_CASE("tokenizer files: faults of the JSON files name the field") {
  TokenizerFiles files = SmallFiles();
  const auto config_error = [&](const std::string& tokenizer_config) {
    files.tokenizer_config = tokenizer_config;
    return Error(files);
  };
  CHECK(Contains(config_error("{}"), "m/tokenizer_config.json: added_tokens_decoder"));
  CHECK(Contains(config_error("{\"added_tokens_decoder\": "), "m/tokenizer_config.json: not valid JSON"));
  CHECK(Contains(config_error(R"({"added_tokens_decoder": {"256": {"content": "x"}}})"),
                 "added_tokens_decoder.256 is not a reserved id"));
  CHECK(Contains(config_error(R"({"added_tokens_decoder": {"513": {"content": "x"}}})"),
                 "added_tokens_decoder.513 is not a reserved id"));
  CHECK(Contains(config_error(R"({"added_tokens_decoder": {"0257": {"content": "x"}}})"),
                 "added_tokens_decoder.0257 is not a reserved id"));
  CHECK(Contains(config_error(R"({"added_tokens_decoder": {"257": {"content": ""}}})"),
                 "added_tokens_decoder.257.content must have"));
  CHECK(Contains(config_error(R"({"added_tokens_decoder": {"257": {"content": 5}}})"),
                 "added_tokens_decoder.257.content must be a string"));
  CHECK(Contains(
      config_error(R"({"added_tokens_decoder": {"257": {"content": "x"}, "258": {"content": "x"}}})"),
      "added_tokens_decoder.258.content is that of 257 again"));
  CHECK(Contains(config_error(R"({"added_tokens_decoder": {"257": {"content": "<|reserved_token_300|>"}}})"),
                 "added_tokens_decoder.257 takes the name of the reserved id 300"));
  files = SmallFiles();
  files.config = R"({"vocab_size": 512})";
  CHECK(Contains(Error(files), "m/config.json: vocab_size is 512, but tiktoken.model has 257 ranks"));
  files.config = R"({"text_config": {"vocab_size": "many"}})";
  CHECK(Contains(Error(files), "m/config.json: text_config.vocab_size must be an integer"));
}

TEST_CASE("tokenizer files: a missing file is named") {
  const auto tokenizer = Tokenizer::Load(KDT_GOLDENS_DIR "/drafter");
  CHECK(tokenizer.status().code() == absl::StatusCode::kNotFound);
  CHECK(Contains(std::string(tokenizer.status().message()), "drafter/tiktoken.model"));
}

}  // namespace
}  // namespace kdt
