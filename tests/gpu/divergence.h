// Where two token streams of the same request part, and how near the two candidates were.
//
// The contract (docs/architecture.md): on CUDA a token may differ from the CPU's only where the best two
// candidates, noise included, are closer than a stated tolerance. The score of a candidate t at position p is
//   logit - penalties + T * noise(seed, p, t)
// in units of logits; the sampler takes the largest. The gap is the score of the expected token less that of
// the token that came, both by the reference's log-probabilities (their common logsumexp cancels).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tests/gpu/streams.h"

namespace kdt::testing {

struct Divergence {
  size_t request = 0;
  std::string kind;
  size_t index = 0;  // of the generated token
  uint32_t expected = 0;
  uint32_t got = 0;
  double gap = 0;  // not finite: it could not be told
};

// The reference's log-probability of `token` behind `prefix`, for tokens outside its list; nothing: unknown.
using Probe = std::function<std::optional<double>(const std::vector<uint32_t>& prefix, uint32_t token)>;

struct Comparison {
  uint64_t requests = 0;
  uint64_t tokens = 0;  // compared: up to the first difference of each request, that one included
  uint64_t rounds =
      0;  // verify steps that the compared streams took, their drafted nodes, and what was accepted
  uint64_t drafted = 0;
  uint64_t accepted = 0;
  std::vector<Divergence> divergences;
  std::vector<std::string> errors;        // streams that failed or have the wrong length
  std::vector<double> logprob_errors;     // |reference - subject| of the same token, where both told it
  double LargestGap() const;              // 0 without divergences
  size_t Beyond(double tolerance) const;  // divergences whose gap is not below it
};

// The score of a token, see above. `generated` are the tokens drawn before it.
double Score(const v1::GenerateRequest& request, const std::vector<uint32_t>& generated, uint32_t token,
             double logprob);

// `reference` was run with log-probabilities. Appends to `out`.
void Compare(const std::vector<PlannedRequest>& requests, const std::vector<Stream>& reference,
             const std::vector<Stream>& subject, const Probe& probe, Comparison* out);

// Asks a server for the log-probability of a token by prompting it with that token.
Probe ProbeServer(v1::Generation::Stub& stub);

}  // namespace kdt::testing
