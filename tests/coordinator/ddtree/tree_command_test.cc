// `kdt tree`, which shows what this folder builds.
#include "client/tree_command.h"

#include <fstream>

#include "nlohmann/json.hpp"
#include "tests/common/support.h"
#include "tests/support/catch.h"

namespace kdt {
namespace {

using Catch::Matchers::ContainsSubstring;

constexpr char kCase[] = R"([{"budget": 4, "topk_ids": [[5, 6], [7, 8]],
  "topk_logprobs": [[-0.6931471805599453, -1.3862943611198906], [-0.2876820724517809, -1.3862943611198906]]}])";

std::string Error(const std::string& content, std::vector<std::string> args) {
  TempFolder folder;
  WriteFile(folder / "case.json", content);
  args.insert(args.begin(), folder / "case.json");
  const auto output = TreeCommandOutput(args);
  return output.ok() ? *output : std::string(output.status().message());
}

TEST_CASE("kdt tree draws a tree with its probabilities") {
  CHECK(Error(kCase, {}) ==
        "case 0: best-first, budget 4: 4 nodes, 2 deep, 2.312 tokens expected a round\n"
        "root\n"
        "├── 5  p 0.500  path 0.5000\n"
        "│   └── 7  p 0.750  path 0.3750\n"
        "└── 6  p 0.250  path 0.2500\n"
        "    └── 7  p 0.750  path 0.1875\n");
  CHECK_THAT(Error(kCase, {"--policy", "chain"}), ContainsSubstring("chain, budget 4: 2 nodes"));
  CHECK_THAT(Error(kCase, {"--budget=1"}), ContainsSubstring("budget 1: 1 nodes, 1 deep"));
}

TEST_CASE("kdt tree --json gives the reference trees") {
  const std::string path = KDT_GOLDENS_DIR "/ddtree.json";
  const auto output = TreeCommandOutput({path, "--json"});
  REQUIRE(output.ok());
  const auto trees = nlohmann::json::parse(*output);
  std::ifstream file(path);
  const auto cases = nlohmann::json::parse(file);
  REQUIRE(trees.size() == cases.size());
  for (size_t i = 0; i < cases.size(); ++i) {
    for (const char* key : {"node_tokens", "node_depths", "parents"}) CHECK(trees[i][key] == cases[i][key]);
  }
}

TEST_CASE("kdt tree names what is wrong") {
  CHECK_THAT(
      Error("[\n  }", {}),
      ContainsSubstring("case.json: not valid JSON: line 2, column 3: expected a value or ']', found '}'"));
  CHECK_THAT(Error("[7]", {}), ContainsSubstring("case 0: is not an object"));
  CHECK_THAT(Error("{}", {}), ContainsSubstring("topk_ids"));
  CHECK_THAT(Error(R"({"topk_ids":[[1]],"topk_logprobs":[[-1]]})", {}), ContainsSubstring("budget"));
  CHECK_THAT(Error(R"({"topk_ids":[[1]],"topk_logprobs":[[-1]],"budget":-1})", {}),
             ContainsSubstring("budget"));
  CHECK_THAT(Error(R"({"topk_ids":[[1]],"topk_logprobs":[[-1]],"budget":5000})", {}),
             ContainsSubstring("budget"));
  CHECK_THAT(Error(R"({"topk_ids":[[1]],"topk_logprobs":[[-1,-2]],"budget":1})", {}),
             ContainsSubstring("topk_logprobs[0]"));
  CHECK_THAT(Error(R"({"topk_ids":[[1]],"topk_logprobs":[],"budget":1})", {}),
             ContainsSubstring("same number"));
  CHECK_THAT(Error(R"({"topk_ids":[[-1]],"topk_logprobs":[[-1]],"budget":1})", {}),
             ContainsSubstring("topk_ids[0][0]"));
  CHECK_THAT(Error(R"({"topk_ids":[["a"]],"topk_logprobs":[[-1]],"budget":1})", {}),
             ContainsSubstring("topk_ids[0][0]"));
  CHECK_THAT(Error(R"({"topk_ids":[[1]],"topk_logprobs":[[null]],"budget":1})", {}),
             ContainsSubstring("topk_logprobs[0][0]"));
  CHECK_THAT(Error(kCase, {"--policy", "dfs"}), ContainsSubstring("dfs"));
  CHECK_THAT(Error(kCase, {"--budget", "-3"}), ContainsSubstring("--budget"));
  CHECK_THAT(Error(kCase, {"--budget"}), ContainsSubstring("needs a value"));
  CHECK_THAT(Error(kCase, {"--colour"}), ContainsSubstring("--colour"));
  CHECK_THAT(Error(kCase, {"other.json"}), ContainsSubstring("other.json"));
  CHECK(RunTreeCommand({}) == 2);
  CHECK(RunTreeCommand({"no-such-file.json"}) == 1);
}

}  // namespace
}  // namespace kdt
