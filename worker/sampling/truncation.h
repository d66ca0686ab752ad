// Which tokens stay for the draw: top_k, then top_p, then min_p, on logits already divided by the
// temperature.
//   top_k: the k best.
//   top_p: of those the smallest set of the best whose probabilities reach top_p (ties: the lower id is
//   better). min_p: of those the ones with at least min_p times the best one's probability.
// All three keep a prefix of the tokens in falling order, so it is enough to know how many.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "worker/sampling/sampling_params.h"

namespace kdt {

struct Candidate {
  int32_t id;
  float value;  // logit / temperature
};

// Better first; ties: lower id.
inline bool operator<(const Candidate& a, const Candidate& b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

// `best`: the best tokens of the vocabulary in order, not empty, of `vocab_size` in all (perhaps a prefix of
// them). `sum_exp`: sum over the whole vocabulary of exp(value - best[0].value). Returns how many of `best`
// stay, at least 1; nullopt when `best` is too short to tell.
std::optional<int64_t> KeptCount(const SamplingParams& params, std::span<const Candidate> best,
                                 int64_t vocab_size, double sum_exp);

// The keyed draw (docs/architecture.md, "Speculation never changes the output") among `kept`: argmax of value
// + g(seed, position, id), in float32; ties: lower id.
int32_t DrawAmong(std::span<const Candidate> kept, uint64_t seed, int64_t position);

}  // namespace kdt
