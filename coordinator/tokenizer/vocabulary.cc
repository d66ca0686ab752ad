#include "coordinator/tokenizer/vocabulary.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/json_config.h"
#include "common/status.h"

namespace kdt {
namespace {

constexpr size_t kMaxRanks = 1 << 22;
constexpr size_t kMaxTokenBytes = 1024;  // the longest of Kimi's are runs of 128 spaces
constexpr size_t kMaxNameBytes = 256;

struct RankLine {
  std::string bytes;
  uint32_t rank = 0;
  size_t number = 0;  // of the line, from 1
};

absl::Status LineFault(const std::string& file, size_t number, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(file, ": line ", number, ": ", why));
}

// "BASE64 RANK".
absl::StatusOr<RankLine> ParseRankLine(std::string_view line, size_t number, const std::string& file) {
  const size_t space = line.find(' ');
  if (space == std::string_view::npos) return LineFault(file, number, "must be \"BASE64 RANK\"");
  RankLine parsed;
  parsed.number = number;
  // absl's decoder skips white space and lets padding be left out; only the canonical form is accepted here.
  const std::string encoded(line.substr(0, space));
  if (!absl::Base64Unescape(encoded, &parsed.bytes) || absl::Base64Escape(parsed.bytes) != encoded) {
    return LineFault(file, number, "the token is not base64");
  }
  if (parsed.bytes.empty() || parsed.bytes.size() > kMaxTokenBytes) {
    return LineFault(
        file, number,
        absl::StrCat("a token must have 1 to ", kMaxTokenBytes, " bytes, has ", parsed.bytes.size()));
  }
  const std::string rank(line.substr(space + 1));
  if (rank.empty() || !std::all_of(rank.begin(), rank.end(), [](char c) { return c >= '0' && c <= '9'; }) ||
      !absl::SimpleAtoi(rank, &parsed.rank) || parsed.rank >= kMaxRanks) {
    return LineFault(file, number, absl::StrCat("the rank is not a number from 0 to ", kMaxRanks - 1));
  }
  return parsed;
}

// The ranks' byte strings, by rank.
absl::StatusOr<std::vector<std::string>> ParseRanks(std::string_view text, const std::string& file) {
  std::vector<RankLine> lines;
  for (size_t number = 1; !text.empty(); ++number) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    if (line.empty()) {
      if (text.empty()) break;
      return LineFault(file, number, "is empty");
    }
    KDT_ASSIGN_OR_RETURN(RankLine parsed, ParseRankLine(line, number, file));
    lines.push_back(std::move(parsed));
  }
  if (lines.empty()) return absl::InvalidArgumentError(absl::StrCat(file, ": holds no ranks"));

  std::vector<std::string> ranks(lines.size());
  std::unordered_map<std::string_view, size_t> seen;  // bytes -> line
  seen.reserve(lines.size());
  for (const RankLine& line : lines) {
    const auto fail = [&](const std::string& why) { return LineFault(file, line.number, why); };
    if (line.rank >= ranks.size()) {
      return fail(absl::StrCat("rank ", line.rank, " leaves a gap: there are ", ranks.size(), " lines"));
    }
    if (!ranks[line.rank].empty()) return fail(absl::StrCat("rank ", line.rank, " was given before"));
    ranks[line.rank] = line.bytes;
    const auto [first, added] = seen.emplace(line.bytes, line.number);
    if (!added) return fail(absl::StrCat("the token is that of line ", first->second, " again"));
  }
  for (int byte = 0; byte < 256; ++byte) {
    const char value = static_cast<char>(byte);
    if (!seen.contains(std::string_view(&value, 1))) {
      return absl::InvalidArgumentError(absl::StrCat(file, ": no token for the single byte ", byte));
    }
  }
  return ranks;
}

struct Reserved {
  std::vector<std::string> names;  // kReservedIds
  std::vector<bool> skipped;
};

absl::StatusOr<Reserved> ParseReserved(const TokenizerFiles& files, uint32_t ranks) {
  KDT_ASSIGN_OR_RETURN(JsonConfig config, JsonConfig::Parse(files.tokenizer_config,
                                                            files.name_prefix + "tokenizer_config.json"));
  JsonConfig decoder = config.Object("added_tokens_decoder");
  Reserved reserved;
  reserved.names.resize(Tokenizer::kReservedIds);
  reserved.skipped.assign(Tokenizer::kReservedIds, true);
  absl::flat_hash_map<std::string, uint32_t> seen;  // name -> id
  for (const std::string& key : decoder.Keys()) {
    uint32_t id = 0;
    if (!absl::SimpleAtoi(key, &id) || absl::StrCat(id) != key || id < ranks ||
        id - ranks >= Tokenizer::kReservedIds) {
      decoder.Fail(key,
                   absl::StrCat("is not a reserved id: tiktoken.model has ", ranks, " ranks, so these are ",
                                ranks, " to ", ranks + Tokenizer::kReservedIds - 1));
      break;
    }
    JsonConfig token = decoder.Object(key);
    std::string name = token.String("content");
    if (name.empty() || name.size() > kMaxNameBytes) {
      token.Fail("content", absl::StrCat("must have 1 to ", kMaxNameBytes, " bytes"));
    }
    reserved.skipped[id - ranks] = token.BoolOr("special", true);
    const auto [first, added] = seen.emplace(name, id);
    if (!added) token.Fail("content", absl::StrCat("is that of ", first->second, " again"));
    reserved.names[id - ranks] = std::move(name);
  }
  KDT_RETURN_IF_ERROR(config.status());
  for (uint32_t i = 0; i < Tokenizer::kReservedIds; ++i) {
    if (!reserved.names[i].empty()) continue;
    reserved.names[i] = absl::StrCat("<|reserved_token_", ranks + i, "|>");
    const auto [first, added] = seen.emplace(reserved.names[i], ranks + i);
    if (!added) {
      decoder.Fail(absl::StrCat(first->second),
                   absl::StrCat("takes the name of the reserved id ", ranks + i));
    }
  }
  KDT_RETURN_IF_ERROR(config.status());
  return reserved;
}

absl::Status CheckVocabSize(const TokenizerFiles& files, uint32_t size) {
  KDT_ASSIGN_OR_RETURN(JsonConfig config, JsonConfig::Parse(files.config, files.name_prefix + "config.json"));
  JsonConfig text_config = config.Has("text_config") ? config.Object("text_config") : config;
  const int64_t vocab_size = text_config.Int("vocab_size", 1, INT32_MAX);
  KDT_RETURN_IF_ERROR(text_config.status());
  if (vocab_size != size) {
    text_config.Fail("vocab_size", absl::StrCat("is ", vocab_size, ", but tiktoken.model has ",
                                                size - Tokenizer::kReservedIds, " ranks, which with ",
                                                Tokenizer::kReservedIds, " reserved ids make ", size));
  }
  return text_config.status();
}

}  // namespace

absl::StatusOr<Vocabulary> Vocabulary::Parse(const TokenizerFiles& files) {
  KDT_ASSIGN_OR_RETURN(const std::vector<std::string> ranks,
                       ParseRanks(files.tiktoken_model, files.name_prefix + "tiktoken.model"));
  Vocabulary vocabulary;
  vocabulary.ranks_ = static_cast<uint32_t>(ranks.size());
  KDT_RETURN_IF_ERROR(CheckVocabSize(files, vocabulary.size()));
  KDT_ASSIGN_OR_RETURN(Reserved reserved, ParseReserved(files, vocabulary.ranks_));
  vocabulary.skipped_ = std::move(reserved.skipped);

  size_t total = 0;
  for (const std::string& token : ranks) total += token.size();
  for (const std::string& name : reserved.names) total += name.size();
  if (total > UINT32_MAX) {
    return absl::InvalidArgumentError(absl::StrCat(files.name_prefix, "tiktoken.model: is too large"));
  }
  vocabulary.bytes_.reserve(total);
  vocabulary.offsets_.reserve(vocabulary.size() + 1);
  vocabulary.offsets_.push_back(0);
  for (const auto* list : {&ranks, &std::as_const(reserved.names)}) {
    for (const std::string& token : *list) {
      vocabulary.bytes_ += token;
      vocabulary.offsets_.push_back(static_cast<uint32_t>(vocabulary.bytes_.size()));
    }
  }
  return vocabulary;
}

}  // namespace kdt
