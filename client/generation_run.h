// One Generate call from start to end, with the times a user feels.
#pragma once

#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "client/connection.h"
#include "kdt/v1/generation.pb.h"

namespace kdt {

struct GenerationRun {
  double seconds = 0;              // call to last message
  double first_token_seconds = 0;  // call to first chunk with a token
  std::vector<double> token_gaps;  // seconds between chunks with tokens, spread evenly over a chunk's tokens
  uint64_t tokens = 0;             // over all samples
  std::vector<v1::Complete> complete;  // one for each sample, in order of index
};

using ChunkHandler = std::function<void(uint32_t index, const v1::Chunk& chunk)>;

// Streams `request`; `on_chunk` (may be null) sees every chunk as it comes. The error is the server's, or
// INTERNAL when the stream ended without a Complete for every sample.
absl::StatusOr<GenerationRun> RunGeneration(GenerationStub& stub, const v1::GenerateRequest& request,
                                            const ChunkHandler& on_chunk);

// Prints the table behind a generation: tokens, seconds, tokens/s, tokens a round when there were any rounds,
// the seed that gives the same again, and what ended a sample.
void PrintSummary(const GenerationRun& run);

}  // namespace kdt
