// A rank without a model: checks every step as strictly as a real one, keeps real slot tables, and draws the
// next token as a hash of the history. The same history always gives the same token, so answers can be
// predicted.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "coordinator/group/group.h"
#include "kdt/v1/worker.pb.h"

namespace kdt::testing {

struct ToyOptions {
  uint32_t vocab = 1024;
  uint64_t slots = 4096;
  uint32_t max_rows = 256;
  uint32_t max_tree_nodes = 65;
  uint32_t max_sequences = 32;
  uint32_t max_context = 1024;
  uint32_t block_size = 0;  // of the toy drafter; 0: none
  uint32_t max_draft_top_k = 8;
  // Instead of the hash; gets the whole history.
  std::function<uint32_t(std::span<const uint32_t>)> next;

  GroupLimits Limits() const;
};

class ToyRank {
 public:
  explicit ToyRank(ToyOptions options) : options_(std::move(options)) {}

  void StartEpoch();
  // An error is what a real rank would answer to a step that it must refuse.
  absl::Status Step(const v1::StepRequest& request, v1::StepResponse* response);

  // The token behind `history`, without penalties: a function of it and, when not greedy, of the seed.
  uint32_t Draw(std::span<const uint32_t> history, const v1::SamplingState& sampling) const;
  // The answer to a prompt: `count` tokens.
  std::vector<uint32_t> Answer(std::vector<uint32_t> prompt, const v1::SamplingState& sampling,
                               uint32_t count) const;

  uint64_t used_slots() const;
  size_t sequences() const { return sequences_.size(); }
  uint64_t steps_with_prefill_and_decode() const { return mixed_steps_; }
  uint64_t prefilled_tokens() const { return prefilled_; }

 private:
  struct Sequence {
    std::vector<uint32_t> tokens;
    std::vector<uint32_t> slots;
    v1::SamplingState sampling;
  };

  absl::Status Apply(const v1::SequenceOp& op);
  absl::Status Start(uint64_t id, const v1::SamplingState& sampling, Sequence sequence);
  absl::Status Check(uint64_t id, uint32_t start, size_t rows);
  absl::Status Prefill(const v1::PrefillChunk& chunk, v1::StepResponse* response);
  absl::Status Verify(const v1::TreeVerify& tree, v1::StepResponse* response);
  void Commit(Sequence* sequence, uint32_t token);
  void Release(const Sequence& sequence);
  void Draft(const Sequence& sequence, uint32_t root, uint32_t k, v1::DraftTopK* draft) const;
  v1::PositionLogprobs Logprobs(std::span<const uint32_t> history, uint32_t token, uint32_t k) const;

  const ToyOptions options_;
  std::map<uint64_t, Sequence> sequences_;
  std::vector<uint32_t> references_;  // by slot
  uint64_t step_ = 0;
  uint64_t rows_needed_ = 0;
  uint64_t mixed_steps_ = 0;
  uint64_t prefilled_ = 0;
  uint64_t digest_ = 0;
};

}  // namespace kdt::testing
