#include "worker/sampling/logit_edits.h"

#include <cmath>
#include <map>
#include <random>

#include "tests/support/catch.h"

namespace kdt {
namespace {

// The definition, token by token, over the whole history.
std::vector<double> Naive(const SamplingParams& params, const std::vector<int32_t>& history, int64_t position,
                          const std::vector<float>& logits) {
  std::vector<double> out(logits.begin(), logits.end());
  std::map<int32_t, int> all;
  std::map<int32_t, int> generated;
  for (size_t i = 0; i < history.size(); ++i) {
    ++all[history[i]];
    if (static_cast<int64_t>(i) >= params.prompt_length) ++generated[history[i]];
  }
  for (const auto& [id, count] : all) {
    out[id] = out[id] > 0 ? out[id] / params.repetition_penalty : out[id] * params.repetition_penalty;
  }
  for (const auto& [id, count] : generated) {
    out[id] -= static_cast<double>(params.frequency_penalty) * count + params.presence_penalty;
  }
  for (const auto& [id, bias] : params.logit_bias) out[id] += bias;
  if (position - params.prompt_length < params.min_tokens) {
    for (int32_t id : params.stop_token_ids) out[id] = -INFINITY;
  }
  return out;
}

}  // namespace

TEST_CASE("edits along a path equal the definition on the whole history, shard by shard") {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(-5, 5);
  constexpr int64_t kVocab = 64;
  for (int c = 0; c < 200; ++c) {
    CAPTURE(c);
    SamplingParams params;
    params.repetition_penalty = c % 2 == 0 ? 1.0f : 1.0f + static_cast<float>(random() % 100) / 100;
    params.frequency_penalty = c % 3 == 0 ? 0.0f : uniform(random);
    params.presence_penalty = c % 5 == 0 ? 0.0f : uniform(random);
    if (c % 4 == 0) params.logit_bias = {{3, 2.5f}, {40, -1.5f}};
    params.prompt_length = random() % 12;
    params.min_tokens = random() % 12;
    params.stop_token_ids = {5, 63};
    std::vector<int32_t> history(random() % 20);
    for (int32_t& token : history) token = static_cast<int32_t>(random() % kVocab);
    const size_t committed = history.empty() ? 0 : random() % history.size();
    const std::span<const int32_t> path(history.begin() + committed, history.end());
    const auto position = static_cast<int64_t>(history.size());
    std::vector<float> logits(kVocab);
    for (float& logit : logits) logit = uniform(random);
    const std::vector<double> expected = Naive(params, history, position, logits);

    const int ranks = 1 << (c % 3);
    const int64_t local = kVocab / ranks;
    for (int rank = 0; rank < ranks; ++rank) {
      SequenceSampling sequence(params, rank * local, local);
      // In two pieces, as chunks come.
      sequence.Append({history.data(), committed / 2});
      sequence.Append({history.data() + committed / 2, committed - committed / 2});
      LogitEditor editor(rank * local, local);
      for (int twice = 0; twice < 2; ++twice) {  // the scratch must be clean behind each use
        std::vector<float> mine(logits.begin() + rank * local, logits.begin() + (rank + 1) * local);
        editor.Apply(sequence, path, position, mine.data());
        for (int64_t i = 0; i < local; ++i) {
          const double want = expected[rank * local + i];
          CHECK((std::isinf(want) ? std::isinf(mine[i]) : std::abs(mine[i] - want) < 1e-4));
        }
        if (!sequence.EditsAt(position)) {
          CHECK(std::equal(mine.begin(), mine.end(), logits.begin() + rank * local));
        }
      }
    }
  }
}

}  // namespace kdt
