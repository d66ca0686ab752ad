#include "coordinator/ddtree/ddtree.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>

#include "common/rng.h"
#include "nlohmann/json.hpp"
#include "tests/support/catch.h"

namespace kdt {
namespace {

struct Guesses {
  size_t depth = 0, k = 0;
  std::vector<uint32_t> tokens;
  std::vector<float> log_probs;
  DraftGuesses view() const { return {depth, k, tokens, log_probs}; }
};

template <typename T>
bool Begins(const std::vector<T>& whole, const std::vector<T>& first) {
  return first.size() <= whole.size() && std::equal(first.begin(), first.end(), whole.begin());
}

// Random guesses whose log-probabilities are multiples of 1/4, so that many sums tie.
Guesses Random(uint64_t seed, size_t depth, size_t k) {
  Guesses guesses{depth, k, {}, {}};
  for (size_t i = 0; i < depth; ++i) {
    std::vector<float> row;
    for (size_t j = 0; j < k; ++j) {
      const uint32_t word = NoiseWords(seed, i, static_cast<uint32_t>(j)).word[0];
      row.push_back(-0.25f * static_cast<float>(1 + word % 16));
      guesses.tokens.push_back(static_cast<uint32_t>(100 * i + j));
    }
    std::sort(row.rbegin(), row.rend());
    guesses.log_probs.insert(guesses.log_probs.end(), row.begin(), row.end());
  }
  return guesses;
}

const Tree& Build(TreeBuilder& builder, TreePolicy policy, const Guesses& guesses, size_t budget) {
  const auto tree = builder.Build(policy, 7, guesses.view(), budget);
  REQUIRE(tree.ok());
  return **tree;
}

TEST_CASE("best-first trees equal the published algorithm's, node for node") {
  std::ifstream file(KDT_GOLDENS_DIR "/ddtree.json");
  const nlohmann::json cases = nlohmann::json::parse(file);
  REQUIRE(cases.size() == 40);
  TreeBuilder builder;
  for (size_t i = 0; i < cases.size(); ++i) {
    INFO("case " << i);
    Guesses guesses;
    guesses.depth = cases[i]["topk_ids"].size();
    guesses.k = cases[i]["topk_ids"][0].size();
    for (size_t d = 0; d < guesses.depth; ++d) {
      for (size_t j = 0; j < guesses.k; ++j) {
        guesses.tokens.push_back(cases[i]["topk_ids"][d][j]);
        guesses.log_probs.push_back(cases[i]["topk_logprobs"][d][j]);
      }
    }
    const Tree& tree = Build(builder, TreePolicy::kBestFirst, guesses, cases[i]["budget"]);
    const std::vector<uint32_t> tokens(tree.tokens.begin() + 1, tree.tokens.end());
    const std::vector<uint32_t> depths(tree.depths.begin() + 1, tree.depths.end());
    CHECK(tokens == cases[i]["node_tokens"].get<std::vector<uint32_t>>());
    CHECK(depths == cases[i]["node_depths"].get<std::vector<uint32_t>>());
    CHECK(tree.parents == cases[i]["parents"].get<std::vector<int32_t>>());
    CHECK(tree.tokens[0] == 7);
  }
}

TEST_CASE("a best-first tree holds the most probable paths") {
  // Enumerates every path of a small case and compares the n best sums.
  const Guesses guesses = Random(3, 4, 3);
  std::vector<double> all;
  std::vector<double> level = {0.0};
  for (size_t d = 0; d < 4; ++d) {
    std::vector<double> next;
    for (const double base : level) {
      for (size_t j = 0; j < 3; ++j) next.push_back(base + guesses.log_probs[d * 3 + j]);
    }
    all.insert(all.end(), next.begin(), next.end());
    level = next;
  }
  std::sort(all.rbegin(), all.rend());
  TreeBuilder builder;
  const Tree& tree = Build(builder, TreePolicy::kBestFirst, guesses, 60);
  REQUIRE(tree.drafted() == 60);
  for (size_t i = 0; i < 60; ++i) CHECK(tree.log_probs[i + 1] == Catch::Approx(all[i]));
}

TEST_CASE("every tree is well formed and nested in the larger ones") {
  TreeBuilder builder;
  for (const TreePolicy policy : {TreePolicy::kBestFirst, TreePolicy::kSpineFirst, TreePolicy::kChain}) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      const Guesses guesses = Random(seed, 1 + seed % 7, 1 + seed % 5);
      const Tree largest = Build(builder, policy, guesses, 64);
      std::map<std::pair<int32_t, uint32_t>, int> seen;
      for (size_t i = 1; i < largest.size(); ++i) {
        const size_t parent = static_cast<size_t>(largest.parents[i]);
        REQUIRE(parent < i);
        CHECK(largest.depths[i] == largest.depths[parent] + 1);
        CHECK(largest.tokens[i] == guesses.tokens[(largest.depths[i] - 1) * guesses.k + largest.ranks[i]]);
        CHECK(largest.log_probs[i] < largest.log_probs[parent]);
        CHECK(++seen[std::pair(largest.parents[i], largest.ranks[i])] == 1);
      }
      for (const size_t budget : {0, 1, 4, 7, 16}) {
        const Tree& small = Build(builder, policy, guesses, budget);
        CHECK(small.drafted() == std::min<size_t>(budget, largest.drafted()));
        CHECK(Begins(largest.tokens, small.tokens));
        CHECK(Begins(largest.parents, small.parents));
        CHECK(Begins(largest.log_probs, small.log_probs));
      }
    }
  }
}

TEST_CASE("spine-first begins with the chain, then takes the best of the rest") {
  TreeBuilder builder;
  const Guesses guesses = Random(11, 5, 4);
  const Tree chain = Build(builder, TreePolicy::kChain, guesses, 64);
  REQUIRE(chain.drafted() == 5);
  for (size_t i = 1; i <= 5; ++i) {
    CHECK(chain.parents[i] == static_cast<int32_t>(i - 1));
    CHECK(chain.ranks[i] == 0);
  }
  CHECK(Build(builder, TreePolicy::kChain, guesses, 3).drafted() == 3);
  const Tree spine = Build(builder, TreePolicy::kSpineFirst, guesses, 24);
  CHECK(Begins(spine.tokens, chain.tokens));
  CHECK(std::is_sorted(spine.log_probs.begin() + 6, spine.log_probs.end(), std::greater<>()));
  // Once the budget holds every path, the policies agree on the set of nodes.
  const Guesses tiny = Random(5, 3, 2);
  Tree a = Build(builder, TreePolicy::kBestFirst, tiny, 100);
  Tree b = Build(builder, TreePolicy::kSpineFirst, tiny, 100);
  CHECK(a.drafted() == 2 + 4 + 8);
  std::sort(a.log_probs.begin(), a.log_probs.end());
  std::sort(b.log_probs.begin(), b.log_probs.end());
  CHECK(a.log_probs == b.log_probs);
}

TEST_CASE("odd guesses give smaller trees, wrong sizes an error") {
  TreeBuilder builder;
  CHECK(Build(builder, TreePolicy::kBestFirst, Guesses{}, 16).size() == 1);
  CHECK(Build(builder, TreePolicy::kChain, Random(1, 4, 2), 0).size() == 1);
  Guesses broken = Random(1, 4, 2);
  broken.log_probs[2] = std::numeric_limits<float>::quiet_NaN();  // the best guess of position 2
  CHECK(Build(builder, TreePolicy::kBestFirst, broken, 16).drafted() == 2);
  CHECK(Build(builder, TreePolicy::kSpineFirst, broken, 16).drafted() == 2);
  broken.log_probs[2] = -std::numeric_limits<float>::infinity();
  CHECK(Build(builder, TreePolicy::kChain, broken, 16).drafted() == 1);
  broken.tokens.pop_back();
  CHECK(builder.Build(TreePolicy::kBestFirst, 0, broken.view(), 16).status().code() ==
        absl::StatusCode::kInvalidArgument);
  CHECK(ParseTreePolicy("spine-first").value() == TreePolicy::kSpineFirst);
  CHECK_FALSE(ParseTreePolicy("dfs").ok());
}

TEST_CASE("ancestor rows hold exactly the path to the root") {
  TreeBuilder builder;
  for (const size_t budget : {0, 1, 63, 64, 255}) {
    const Tree& tree = Build(builder, TreePolicy::kBestFirst, Random(9, 7, 16), budget);
    REQUIRE(tree.drafted() == budget);
    std::vector<uint64_t> rows(3, ~uint64_t{0});
    const size_t words = AncestorRows(tree.parents, &rows);
    REQUIRE(words == (tree.size() + 63) / 64);
    REQUIRE(rows.size() == tree.size() * words);
    for (size_t node = 0; node < tree.size(); ++node) {
      std::vector<uint64_t> expected(words, 0);
      for (int32_t at = static_cast<int32_t>(node); at >= 0; at = tree.parents[static_cast<size_t>(at)]) {
        expected[static_cast<size_t>(at) / 64] |= uint64_t{1} << (at % 64);
      }
      CHECK(std::equal(expected.begin(), expected.end(),
                       rows.begin() + static_cast<std::ptrdiff_t>(node * words)));
    }
  }
}

}  // namespace
}  // namespace kdt
