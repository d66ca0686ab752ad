// The draw from a nucleus (top_p, min_p) too wide for the ranks' candidates, without sorting or gathering the
// vocabulary.
//
// The drawn token is the kept one with the largest value + noise. So take the winner of all tokens, w: it is
// kept exactly when the probabilities of the tokens better than w sum to less than top_p (and w itself passes
// min_p). If it is not kept, no token worse than w is either, and the search goes on among the better ones. A
// round costs two small gathers, and the first one ends the search with probability top_p.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "worker/sampling/sampling_params.h"
#include "worker/sampling/truncation.h"
#include "worker/sampling/vocab_gather.h"

namespace kdt {

struct NucleusRow {
  const SamplingParams* params = nullptr;  // top_k is off
  int64_t position = 0;
  LogSum total{kNoLogit, 0};  // over the whole vocabulary, of logit / temperature
  std::vector<float> values;  // this rank's logits / temperature
  int32_t local_id = -1;      // this rank's winner among all tokens (global id), -1: none
  float local_noisy = 0;      // its value + noise
  int32_t drawn = -1;         // the result
};

// Every rank passes the same rows with its own values.
absl::Status DrawFromNuclei(std::span<NucleusRow> rows, int64_t vocab_begin, WordGather& gather,
                            Collective& collective);

}  // namespace kdt
