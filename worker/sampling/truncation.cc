#include "worker/sampling/truncation.h"

#include <algorithm>
#include <cmath>

#include "common/rng.h"

namespace kdt {

std::optional<int64_t> KeptCount(const SamplingParams& params, std::span<const Candidate> best,
                                 int64_t vocab_size, double sum_exp) {
  const int64_t known = static_cast<int64_t>(best.size());
  const int64_t limit = params.top_k > 0 ? std::min(params.top_k, vocab_size) : vocab_size;
  const double top = best[0].value;
  const auto weight = [&](int64_t i) { return std::exp(static_cast<double>(best[i].value) - top); };
  double total = sum_exp;
  if (params.top_k > 0) {
    if (known < limit) return std::nullopt;
    total = 0;
    for (int64_t i = 0; i < limit; ++i) total += weight(i);
  }
  double sum = 0;
  for (int64_t i = 0; i < std::min(known, limit); ++i) {
    const double w = weight(i);
    // The best one always stays; a masked token (weight 0) never does.
    if (i > 0 && (w < params.min_p || w == 0)) return i;
    sum += w;
    if (params.top_p < 1 && sum >= params.top_p * total) return i + 1;
  }
  if (known < limit) return std::nullopt;
  return limit;
}

int32_t DrawAmong(std::span<const Candidate> kept, uint64_t seed, int64_t position) {
  int32_t best_id = -1;
  float best = 0;
  for (const Candidate& candidate : kept) {
    const float value = candidate.value + GumbelNoise(seed, position, static_cast<uint32_t>(candidate.id));
    if (best_id < 0 || value > best || (value == best && candidate.id < best_id)) {
      best = value;
      best_id = candidate.id;
    }
  }
  return best_id;
}

}  // namespace kdt
