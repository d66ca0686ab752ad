// A run of mixed steps on the reference checkpoint with its drafter.
#pragma once

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "tests/support/catch.h"
#include "tests/worker/support/engine_group.h"

namespace kdt::testing {

inline constexpr int32_t kVocab = 1024;

inline std::vector<int32_t> RandomTokens(std::mt19937& random, size_t count) {
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % kVocab);
  return tokens;
}

inline v1::SamplingState Sampling(uint32_t prompt_length, uint64_t seed) {
  v1::SamplingState sampling = GreedySampling(prompt_length);
  sampling.set_temperature(seed % 2 == 0 ? 0.0f : 0.8f);
  sampling.set_seed(seed);
  return sampling;
}

// Prompts that come in one after the other, decoded with random trees and drafts: all that a client sees of
// it, as bytes, and the digest of every step.
inline std::string RunMix(EngineGroup& group, bool general) {
  constexpr int kRequests = 6, kSteps = 24;
  group.Restart();
  std::mt19937 random(11);
  std::vector<std::vector<int32_t>> prompts;
  for (int i = 0; i < kRequests; ++i) prompts.push_back(RandomTokens(random, 1 + random() % 90));
  std::vector<uint32_t> length(kRequests, 0);
  std::vector<int32_t> root(kRequests, 0);
  std::string seen;
  for (int step = 0; step < kSteps; ++step) {
    v1::StepRequest request;
    if (step < kRequests) {
      v1::SamplingState sampling = Sampling(static_cast<uint32_t>(prompts[step].size()), step);
      if (general && step % 2 == 0) sampling.set_logprobs(2);
      if (general && step % 2 == 1) sampling.set_top_p(0.9f);
      AddCreate(&request, step + 1, sampling);
      v1::PrefillChunk* chunk = AddChunk(&request, step + 1, 0, prompts[step]);
      chunk->set_sample(true);
      chunk->set_draft_top_k(5);
    }
    for (int i = 0; i < std::min(step, kRequests); ++i) {
      std::vector<int32_t> tokens = {root[i]}, parents;
      const size_t nodes = 1 + random() % 12;
      while (tokens.size() < nodes) {
        parents.push_back(static_cast<int32_t>(random() % tokens.size()));
        tokens.push_back(static_cast<int32_t>(random() % kVocab));
      }
      AddTree(&request, i + 1, length[i], tokens, parents)->set_draft_top_k(7);
    }
    const auto response = group.Step(request);
    INFO(response.status());
    REQUIRE(response.ok());
    for (const v1::SequenceResult& result : response->results()) {
      const auto i = static_cast<size_t>(result.sequence_id() - 1);
      REQUIRE(result.error().empty());
      length[i] += length[i] == 0 ? static_cast<uint32_t>(prompts[i].size())
                                  : static_cast<uint32_t>(1 + result.accepted_nodes_size());
      root[i] = static_cast<int32_t>(result.tokens(result.tokens_size() - 1));
      seen += result.SerializeAsString();
    }
    seen += std::to_string(response->digest());
  }
  return seen;
}

}  // namespace kdt::testing
