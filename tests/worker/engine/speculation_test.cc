// Trees never change the output: tokens and log-probabilities have the same bits as plain decoding, whatever
// the tree, the sampling parameters and the company in the step.
#include <algorithm>
#include <map>
#include <random>

#include "tests/support/catch.h"
#include "tests/worker/support/engine_group.h"

namespace kdt::testing {
namespace {

constexpr int32_t kVocab = 1024;
constexpr int kTokens = 24;
constexpr int kDraftTop = 4;

struct Stream {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;  // chosen and best, one behind the other
};

void Take(const v1::SequenceResult& result, Stream* stream) {
  REQUIRE(result.error().empty());
  REQUIRE(result.logprobs_size() == result.tokens_size());
  for (int i = 0; i < result.tokens_size(); ++i) {
    stream->tokens.push_back(static_cast<int32_t>(result.tokens(i)));
    stream->logprobs.push_back(result.logprobs(i).token().logprob());
    for (const v1::TokenLogprob& top : result.logprobs(i).top()) stream->logprobs.push_back(top.logprob());
  }
}

void CheckSamePrefix(const Stream& a, const Stream& b) {
  const size_t n = std::min({a.tokens.size(), b.tokens.size(), size_t{kTokens}});
  REQUIRE(n == kTokens);
  CHECK(std::equal(a.tokens.begin(), a.tokens.begin() + n, b.tokens.begin()));
  const size_t width = a.logprobs.size() / a.tokens.size();
  CHECK(std::equal(a.logprobs.begin(), a.logprobs.begin() + n * width, b.logprobs.begin()));
}

v1::SamplingState DrawSampling(std::mt19937_64& random, uint32_t prompt_length) {
  const auto coin = [&random] { return random() % 2 == 0; };
  constexpr float kTemperatures[] = {0.0f, 0.7f, 1.0f, 1.3f};
  v1::SamplingState sampling;
  sampling.set_temperature(kTemperatures[random() % 4]);
  sampling.set_top_p(coin() ? 0.9f : 1.0f);
  sampling.set_top_k(coin() ? (coin() ? 20 : 100) : 0);
  sampling.set_min_p(coin() ? 0.05f : 0.0f);
  sampling.set_repetition_penalty(coin() ? 1.3f : 1.0f);
  sampling.set_frequency_penalty(coin() ? 0.4f : 0.0f);
  sampling.set_presence_penalty(coin() ? 0.3f : 0.0f);
  if (coin()) (*sampling.mutable_logit_bias())[random() % kVocab] = 3.0f;
  sampling.set_seed(random());
  sampling.set_prompt_length(prompt_length);
  sampling.set_min_tokens(coin() ? 10 : 0);
  // Many stop tokens, so that the mask matters.
  for (uint32_t id = 0; id < 64; ++id) sampling.add_stop_token_ids(id * 16);
  sampling.set_logprobs(3);
  return sampling;
}

struct Tree {
  std::vector<int32_t> tokens;
  std::vector<int32_t> parents;
};

// A random tree in which each level may hold the token that plain decoding gives there.
Tree DrawTree(std::mt19937_64& random, int32_t root, const std::vector<int32_t>& truth, size_t position) {
  Tree tree{{root}, {}};
  std::vector<int32_t> depth = {0};
  std::vector<bool> on_path = {true};
  std::vector<std::map<int32_t, bool>> children(1);
  const size_t nodes = 1 + random() % 40;
  while (tree.tokens.size() < nodes) {
    const size_t parent = random() % 3 == 0 ? random() % tree.tokens.size() : tree.tokens.size() - 1;
    const size_t next = position + static_cast<size_t>(depth[parent]);
    const bool true_token = on_path[parent] && next < truth.size() && random() % 8 != 0;
    const int32_t token = true_token ? truth[next] : static_cast<int32_t>(random() % kVocab);
    if (children[parent].count(token) != 0) continue;
    children[parent][token] = true;
    children.emplace_back();
    on_path.push_back(on_path[parent] && next < truth.size() && token == truth[next]);
    depth.push_back(depth[parent] + 1);
    tree.tokens.push_back(token);
    tree.parents.push_back(static_cast<int32_t>(parent));
  }
  return tree;
}

}  // namespace

TEST_CASE("trees give the bits of plain decoding") {
  const auto [tp, drafter] = GENERATE(table<int, bool>({{1, false}, {1, true}, {2, false}, {8, true}}));
  CAPTURE(tp, drafter);
  auto group = EngineGroup::Start(GoldenOptions(drafter), tp);
  REQUIRE(group.ok());
  std::mt19937_64 random(7 + tp);
  const int cases = tp == 1 ? 12 : 4;
  size_t accepted = 0;
  for (int c = 0; c < cases; ++c) {
    CAPTURE(c);
    (*group)->Restart();
    std::vector<int32_t> prompt(3 + random() % 40);
    for (int32_t& token : prompt) token = static_cast<int32_t>(random() % kVocab);
    const auto prompt_length = static_cast<uint32_t>(prompt.size());
    const v1::SamplingState sampling = DrawSampling(random, prompt_length);
    CAPTURE(sampling.ShortDebugString());

    // Plain: sequence 1.
    Stream plain;
    v1::StepRequest request;
    AddCreate(&request, 1, sampling);
    AddChunk(&request, 1, 0, prompt)->set_sample(true);
    auto response = (*group)->Step(request);
    REQUIRE(response.ok());
    Take(response->results(0), &plain);
    while (plain.tokens.size() < kTokens) {
      v1::StepRequest decode;
      AddTree(&decode, 1, prompt_length + static_cast<uint32_t>(plain.tokens.size()) - 1,
              {plain.tokens.back()}, {});
      response = (*group)->Step(decode);
      REQUIRE(response.ok());
      Take(response->results(0), &plain);
    }

    // Trees: sequence 2, beside others that do something else.
    Stream trees;
    v1::StepRequest second;
    AddCreate(&second, 2, sampling);
    AddCreate(&second, 3, GreedySampling(prompt_length));
    AddChunk(&second, 2, 0, prompt)->set_sample(true);
    response = (*group)->Step(second);
    REQUIRE(response.ok());
    Take(response->results(0), &trees);
    uint32_t filler = 0;
    while (trees.tokens.size() < kTokens) {
      const size_t known = trees.tokens.size();
      const Tree tree = DrawTree(random, trees.tokens.back(), plain.tokens, known);
      v1::StepRequest verify;
      if (random() % 2 == 0) {
        AddChunk(&verify, 3, filler, {static_cast<int32_t>(random() % kVocab), 5});
        filler += 2;
      }
      v1::TreeVerify* item =
          AddTree(&verify, 2, prompt_length + static_cast<uint32_t>(known) - 1, tree.tokens, tree.parents);
      if (drafter) item->set_draft_top_k(kDraftTop);
      response = (*group)->Step(verify);
      REQUIRE(response.ok());
      REQUIRE(response->results_size() == 1);
      accepted += response->results(0).accepted_nodes_size();
      Take(response->results(0), &trees);
    }
    CheckSamePrefix(plain, trees);
  }
  CHECK(accepted > 20);  // the trees did carry true paths
}

TEST_CASE("drafts behind a tree are those behind the same tokens decoded one by one") {
  auto group = EngineGroup::Start(GoldenOptions(true), 1);
  REQUIRE(group.ok());
  const std::vector<int32_t> prompt = {703, 80, 91, 337, 269};
  v1::StepRequest request;
  for (uint64_t id : {1, 2}) {
    AddCreate(&request, id, GreedySampling(5));
    AddChunk(&request, id, 0, prompt)->set_sample(true);
  }
  auto response = (*group)->Step(request);
  REQUIRE(response.ok());
  std::vector<int32_t> plain = {static_cast<int32_t>(response->results(0).tokens(0))};
  v1::DraftTopK plain_draft;
  for (int i = 0; i < 4; ++i) {
    v1::StepRequest decode;
    AddTree(&decode, 1, 5 + i, {plain.back()}, {})->set_draft_top_k(kDraftTop);
    response = (*group)->Step(decode);
    REQUIRE(response.ok());
    plain.push_back(static_cast<int32_t>(response->results(0).tokens(0)));
    plain_draft = response->results(0).draft();
  }
  // The same tokens in one tree, between wrong ones: nodes 2, 4, 5 are the path.
  v1::StepRequest verify;
  AddTree(&verify, 2, 5, {plain[0], 1000, plain[1], 1001, plain[2], plain[3]}, {0, 0, 2, 2, 4})
      ->set_draft_top_k(kDraftTop);
  response = (*group)->Step(verify);
  REQUIRE(response.ok());
  const v1::SequenceResult& result = response->results(0);
  CHECK(std::vector<uint32_t>(result.accepted_nodes().begin(), result.accepted_nodes().end()) ==
        std::vector<uint32_t>{2, 4, 5});
  CHECK(std::vector<int32_t>(result.tokens().begin(), result.tokens().end()) ==
        std::vector<int32_t>(plain.begin() + 1, plain.end()));
  CHECK(result.draft().SerializeAsString() == plain_draft.SerializeAsString());
}

}  // namespace kdt::testing
