#include "coordinator/tokenizer/byte_pairs.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "tests/support/catch.h"

namespace kdt {
namespace {

// A vocabulary over a, b, c in which many merges overlap.
std::vector<std::string> RandomTokens(std::mt19937& random, size_t merges) {
  std::vector<std::string> tokens;
  std::set<std::string> seen;
  for (int byte = 0; byte < 256; ++byte) tokens.push_back(std::string(1, static_cast<char>(byte)));
  std::vector<std::string> parts = {"a", "b", "c"};
  while (tokens.size() < 256 + merges) {
    const std::string merged = parts[random() % parts.size()] + parts[random() % parts.size()];
    if (merged.size() > 12 || !seen.insert(merged).second) continue;
    tokens.push_back(merged);
    parts.push_back(merged);
  }
  return tokens;
}

// The definition, word for word.
std::vector<uint32_t> Naive(const std::vector<std::string>& tokens, const std::string& piece) {
  std::map<std::string, uint32_t> ranks;
  for (size_t i = 0; i < tokens.size(); ++i) ranks[tokens[i]] = static_cast<uint32_t>(i);
  if (ranks.contains(piece)) return {ranks[piece]};
  std::vector<std::string> parts;
  for (const char byte : piece) parts.push_back(std::string(1, byte));
  while (true) {
    size_t best = parts.size();
    uint32_t best_rank = UINT32_MAX;
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      const auto found = ranks.find(parts[i] + parts[i + 1]);
      if (found == ranks.end() || found->second >= best_rank) continue;
      best = i;
      best_rank = found->second;
    }
    if (best == parts.size()) break;
    parts[best] += parts[best + 1];
    parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
  std::vector<uint32_t> ids;
  for (const std::string& part : parts) ids.push_back(ranks[part]);
  return ids;
}

TEST_CASE("byte pairs: short and long pieces merge as the definition says") {
  std::mt19937 random(5);
  for (int round = 0; round < 30; ++round) {
    const std::vector<std::string> tokens = RandomTokens(random, 1 + random() % 60);
    const BytePairs byte_pairs(std::vector<std::string_view>(tokens.begin(), tokens.end()));
    for (const size_t size : {1, 2, 3, 7, 12, 30, 47, 48, 49, 50, 130, 300}) {
      std::string piece;
      for (size_t i = 0; i < size; ++i) piece += "abcd"[random() % (round % 2 ? 2 : 4)];
      INFO(piece);
      std::vector<uint32_t> ids = {7};
      byte_pairs.Encode(piece, &ids);
      std::vector<uint32_t> expected = Naive(tokens, piece);
      expected.insert(expected.begin(), 7);
      CHECK(ids == expected);
    }
  }
}

TEST_CASE("byte pairs: a token that merging cannot reach is still found whole") {
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte) tokens.push_back(std::string(1, static_cast<char>(byte)));
  tokens.push_back("abcd");
  const BytePairs byte_pairs(std::vector<std::string_view>(tokens.begin(), tokens.end()));
  std::vector<uint32_t> ids;
  byte_pairs.Encode("abcd", &ids);
  CHECK(ids == std::vector<uint32_t>{256});
  ids.clear();
  byte_pairs.Encode("abcda", &ids);
  CHECK(ids == std::vector<uint32_t>{'a', 'b', 'c', 'd', 'a'});
}

}  // namespace
}  // namespace kdt
