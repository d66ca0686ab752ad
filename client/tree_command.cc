#include "client/tree_command.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <span>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "common/json_fault.h"
#include "common/status.h"
#include "coordinator/ddtree/ddtree.h"
#include "nlohmann/json.hpp"

namespace kdt {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxBudget = 4096;
constexpr size_t kMaxDepth = 256;
constexpr size_t kMaxK = 4096;
constexpr char kUsage[] =
    "usage: kdt tree FILE [--json] [--policy best-first|spine-first|chain] [--budget N] [--case I]\n"
    "Builds the draft trees of the cases in FILE (topk_ids, topk_logprobs, budget) and draws them.\n"
    "Each node shows its token, its probability at its position and the probability of the whole path.\n"
    "Cases recorded by a server (kdt-launch --record_trees) also show texts, and * on the nodes that were "
    "accepted.\n"
    "--case draws case I alone; \"best\" the one with the most accepted nodes.\n"
    "--json prints node_tokens, node_depths and parents of each case instead.\n";

struct Options {
  std::string file;
  bool json = false;
  bool help = false;
  TreePolicy policy = TreePolicy::kBestFirst;
  std::optional<size_t> budget;
  std::optional<size_t> only;  // index of the one case to draw
  bool best = false;           // the case with the most accepted nodes
};

struct Case {
  size_t budget = 0;
  size_t depth = 0, k = 0;
  std::vector<uint32_t> tokens;
  std::vector<float> log_probs;
  std::map<uint32_t, std::string> texts;  // recorded cases: of each token in topk_ids
  std::string root_text;
  std::vector<uint32_t> accepted;  // recorded cases: tokens of the accepted path
  DraftGuesses guesses() const { return {depth, k, tokens, log_probs}; }
};

absl::StatusOr<Options> ParseArguments(const std::vector<std::string>& args) {
  Options options;
  for (size_t i = 0; i < args.size(); ++i) {
    std::string name = args[i];
    std::optional<std::string> value;
    const size_t equals = name.find('=');
    if (absl::StartsWith(name, "--") && equals != std::string::npos) {
      value = name.substr(equals + 1);
      name.resize(equals);
    }
    const bool takes_value = name == "--policy" || name == "--budget" || name == "--case";
    if (takes_value && !value) {
      if (i + 1 == args.size()) return absl::InvalidArgumentError(absl::StrCat(name, " needs a value"));
      value = args[++i];
    }
    if (name == "--json" && !value) {
      options.json = true;
    } else if (name == "--help" && !value) {
      options.help = true;
    } else if (name == "--policy") {
      KDT_ASSIGN_OR_RETURN(options.policy, ParseTreePolicy(*value));
    } else if (name == "--budget") {
      uint32_t budget = 0;
      if (!absl::SimpleAtoi(*value, &budget) || budget > kMaxBudget) {
        return absl::InvalidArgumentError(
            absl::StrCat("--budget must be 0 .. ", kMaxBudget, ", is \"", *value, "\""));
      }
      options.budget = budget;
    } else if (name == "--case" && *value == "best") {
      options.best = true;
    } else if (name == "--case") {
      uint32_t index = 0;
      if (!absl::SimpleAtoi(*value, &index)) {
        return absl::InvalidArgumentError(
            absl::StrCat("--case must be a number or best, is \"", *value, "\""));
      }
      options.only = index;
    } else if (!absl::StartsWith(name, "-") && options.file.empty()) {
      options.file = name;
    } else {
      return absl::InvalidArgumentError(absl::StrCat("unexpected argument \"", args[i], "\""));
    }
  }
  if (options.file.empty() && !options.help) return absl::InvalidArgumentError("FILE is missing");
  return options;
}

// What only recorded cases have: token_text (object: id -> text), root_text, accepted_tokens.
absl::Status ParseRecording(const Json& json, Case* result) {
  if (json.contains("token_text")) {
    const Json& texts = json["token_text"];
    if (!texts.is_object()) return absl::InvalidArgumentError("token_text must be an object");
    for (const auto& [key, text] : texts.items()) {
      uint32_t id = 0;
      if (!absl::SimpleAtoi(key, &id) || !text.is_string()) {
        return absl::InvalidArgumentError(
            absl::StrCat("token_text: \"", key, "\" must be a token id with a text"));
      }
      result->texts[id] = text.get<std::string>();
    }
  }
  if (json.contains("root_text")) {
    if (!json["root_text"].is_string()) return absl::InvalidArgumentError("root_text must be a text");
    result->root_text = json["root_text"].get<std::string>();
  }
  if (json.contains("accepted_tokens")) {
    const Json& accepted = json["accepted_tokens"];
    if (!accepted.is_array()) return absl::InvalidArgumentError("accepted_tokens must be a list");
    for (const Json& id : accepted) {
      if (!id.is_number_unsigned() || id.get<uint64_t>() > std::numeric_limits<uint32_t>::max()) {
        return absl::InvalidArgumentError("accepted_tokens must be token ids");
      }
      result->accepted.push_back(id.get<uint32_t>());
    }
  }
  return absl::OkStatus();
}

// Faults name the field; the caller adds file and case.
absl::StatusOr<Case> ParseCase(const Json& json, std::optional<size_t> budget) {
  Case result;
  if (!json.is_object()) return absl::InvalidArgumentError("is not an object");
  for (const char* key : {"topk_ids", "topk_logprobs"}) {
    if (!json.contains(key) || !json[key].is_array())
      return absl::InvalidArgumentError(absl::StrCat(key, " must be a list"));
  }
  const Json &ids = json["topk_ids"], &log_probs = json["topk_logprobs"];
  result.depth = ids.size();
  result.k = ids.empty() ? 0 : ids[0].size();
  if (result.depth > kMaxDepth || result.k > kMaxK || log_probs.size() != result.depth) {
    return absl::InvalidArgumentError(
        absl::StrCat("topk_ids and topk_logprobs must have the same number of positions, at most ", kMaxDepth,
                     ", of at most ", kMaxK, " guesses"));
  }
  for (size_t i = 0; i < result.depth; ++i) {
    if (!ids[i].is_array() || !log_probs[i].is_array() || ids[i].size() != result.k ||
        log_probs[i].size() != result.k) {
      return absl::InvalidArgumentError(
          absl::StrCat("topk_ids[", i, "] and topk_logprobs[", i, "] must be lists of ", result.k));
    }
    for (size_t j = 0; j < result.k; ++j) {
      if (!ids[i][j].is_number_unsigned() ||
          ids[i][j].get<uint64_t>() > std::numeric_limits<uint32_t>::max()) {
        return absl::InvalidArgumentError(absl::StrCat("topk_ids[", i, "][", j, "] is not a token id"));
      }
      if (!log_probs[i][j].is_number()) {
        return absl::InvalidArgumentError(absl::StrCat("topk_logprobs[", i, "][", j, "] is not a number"));
      }
      result.tokens.push_back(ids[i][j].get<uint32_t>());
      result.log_probs.push_back(log_probs[i][j].get<float>());
    }
  }
  if (budget) {
    result.budget = *budget;
  } else {
    if (!json.contains("budget") || !json["budget"].is_number_unsigned() ||
        json["budget"].get<uint64_t>() > kMaxBudget) {
      return absl::InvalidArgumentError(
          absl::StrCat("budget must be 0 .. ", kMaxBudget, " (or give --budget)"));
    }
    result.budget = json["budget"].get<size_t>();
  }
  KDT_RETURN_IF_ERROR(ParseRecording(json, &result));
  return result;
}

absl::StatusOr<std::vector<Case>> ReadCases(const Options& options) {
  std::ifstream file(options.file, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat(options.file, ": cannot be opened"));
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  KDT_ASSIGN_OR_RETURN(const Json json, ParseJson(text, options.file));
  std::vector<Case> cases;
  const Json list = json.is_array() ? json : Json::array({json});
  for (size_t i = 0; i < list.size(); ++i) {
    absl::StatusOr<Case> one = ParseCase(list[i], options.budget);
    if (!one.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(options.file, ": case ", i, ": ", one.status().message()));
    }
    cases.push_back(*std::move(one));
  }
  return cases;
}

std::string Label(const Case& input, uint32_t token) {
  const auto text = input.texts.find(token);
  return text == input.texts.end() ? absl::StrCat(token)
                                   : absl::StrCat("\"", absl::Utf8SafeCEscape(text->second), "\"");
}

// `accepted`: what is left of the accepted path below `node`, when the path came through it.
void DrawNode(const Tree& tree, const Case& input, const std::vector<std::vector<size_t>>& children,
              size_t node, std::span<const uint32_t> accepted, const std::string& indent, std::string* out) {
  for (size_t i = 0; i < children[node].size(); ++i) {
    const size_t child = children[node][i];
    const bool last = i + 1 == children[node].size();
    const bool kept = !accepted.empty() && accepted[0] == tree.tokens[child];
    const double p = std::exp(input.log_probs[(tree.depths[child] - 1) * input.k + tree.ranks[child]]);
    absl::StrAppendFormat(out, "%s%s %s%s  p %.3f  path %.4f\n", indent, last ? "└──" : "├──",
                          kept ? "* " : "", Label(input, tree.tokens[child]), p,
                          std::exp(tree.log_probs[child]));
    DrawNode(tree, input, children, child, kept ? accepted.subspan(1) : std::span<const uint32_t>(),
             absl::StrCat(indent, last ? "    " : "│   "), out);
  }
}

void Draw(const Tree& tree, const Case& input, size_t index, TreePolicy policy, std::string* out) {
  double expected = 0.0;
  uint32_t deepest = 0;
  std::vector<std::vector<size_t>> children(tree.size());
  for (size_t node = 1; node < tree.size(); ++node) {
    expected += std::exp(tree.log_probs[node]);
    deepest = std::max(deepest, tree.depths[node]);
    children[static_cast<size_t>(tree.parents[node])].push_back(node);
  }
  absl::StrAppendFormat(out, "case %d: %s, budget %d: %d nodes, %d deep, %.3f tokens expected a round\n",
                        index, TreePolicyName(policy), input.budget, tree.drafted(), deepest, 1.0 + expected);
  absl::StrAppend(out, "root");
  if (!input.root_text.empty()) absl::StrAppend(out, " \"", absl::Utf8SafeCEscape(input.root_text), "\"");
  absl::StrAppend(out, "\n");
  DrawNode(tree, input, children, 0, input.accepted, "", out);
}

Json ToJson(const Tree& tree) {
  // As in the reference cases: the root has a parent entry (-1) but is no node.
  return {{"node_tokens", std::vector<uint32_t>(tree.tokens.begin() + 1, tree.tokens.end())},
          {"node_depths", std::vector<uint32_t>(tree.depths.begin() + 1, tree.depths.end())},
          {"parents", tree.parents}};
}

}  // namespace

absl::StatusOr<std::string> TreeCommandOutput(const std::vector<std::string>& args) {
  KDT_ASSIGN_OR_RETURN(const Options options, ParseArguments(args));
  if (options.help) return std::string(kUsage);
  KDT_ASSIGN_OR_RETURN(const std::vector<Case> cases, ReadCases(options));
  std::optional<size_t> only = options.only;
  if (options.best && !cases.empty()) {
    only =
        std::max_element(cases.begin(), cases.end(),
                         [](const Case& a, const Case& b) { return a.accepted.size() < b.accepted.size(); }) -
        cases.begin();
  }
  if (only.has_value() && *only >= cases.size()) {
    return absl::OutOfRangeError(absl::StrCat("--case: ", options.file, " has ", cases.size(), " cases"));
  }
  std::string text;
  Json json = Json::array();
  TreeBuilder builder;
  for (size_t i = 0; i < cases.size(); ++i) {
    if (only.has_value() && i != *only) continue;
    // The token that a round starts from is not part of a case.
    KDT_ASSIGN_OR_RETURN(const Tree* tree,
                         builder.Build(options.policy, 0, cases[i].guesses(), cases[i].budget));
    if (options.json) {
      json.push_back(ToJson(*tree));
    } else {
      Draw(*tree, cases[i], i, options.policy, &text);
    }
  }
  return options.json ? json.dump() + "\n" : text;
}

int RunTreeCommand(const std::vector<std::string>& args) {
  const absl::StatusOr<Options> options = ParseArguments(args);
  if (!options.ok()) {
    std::fprintf(stderr, "%s\n%s", std::string(options.status().message()).c_str(), kUsage);
    return 2;
  }
  const absl::StatusOr<std::string> output = TreeCommandOutput(args);
  if (!output.ok()) {
    std::fprintf(stderr, "%s\n", std::string(output.status().message()).c_str());
    return 1;
  }
  std::fwrite(output->data(), 1, output->size(), stdout);
  return 0;
}

}  // namespace kdt
