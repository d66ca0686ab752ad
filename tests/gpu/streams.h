// Requests with a mix of sampling, and the token streams that a group answers them with.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kdt/v1/generation.grpc.pb.h"

namespace kdt::testing {

// One request without its speculation, which each run sets.
struct PlannedRequest {
  std::string kind;  // "greedy", "sampled", ...: which path of the sampler it takes
  v1::GenerateRequest request;
};

struct Stream {
  std::vector<uint32_t> tokens;
  std::vector<v1::PositionLogprobs> logprobs;  // where they were asked for
  std::string error;                           // not empty: how the stream ended instead of with Complete
  uint32_t rounds = 0;                         // verify steps
  uint32_t drafted = 0;                        // nodes verified, roots not counted
  uint32_t accepted = 0;                       // of them
};

struct Speculation {
  std::string name;
  v1::SpeculationParams params;
};

// "off", "chain", "auto" or "tree N".
absl::StatusOr<Speculation> ParseSpeculation(const std::string& name);

// `count` requests over the prompts in turn, from `first_seed` on: greedy ones, sampled ones at several
// temperatures (both need nothing but argmax(logit / T + noise)), some with penalties and some with
// log-probabilities (these take the sampler's general path). Every stream has exactly `tokens` tokens.
// `prompts_file` is JSON with prompts[].text. Token ids come from the server's own tokenizer.
absl::StatusOr<std::vector<PlannedRequest>> PlanRequests(v1::Generation::Stub& stub,
                                                         const std::string& prompts_file, size_t count,
                                                         uint32_t tokens, uint64_t first_seed);

// Runs all of them, `concurrency` at a time. `logprobs` > 0 asks every request for that many; 0: as planned.
// `seen`, when given, counts tokens as they come.
std::vector<Stream> RunStreams(v1::Generation::Stub& stub, const std::vector<PlannedRequest>& requests,
                               const Speculation& speculation, size_t concurrency, uint32_t logprobs,
                               std::atomic<uint64_t>* seen = nullptr);

}  // namespace kdt::testing
