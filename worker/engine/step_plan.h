// A StepRequest, checked whole before anything changes, in the engine's own terms.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/kv_pool/kv_pool.h"
#include "worker/sampling/sampling_params.h"

namespace kdt {

namespace v1 {
class StepRequest;
}

struct StepLimits {
  int64_t vocab_size = 0;
  int64_t max_rows = 0;
  int64_t max_tree_nodes = 0;
  int64_t max_sequences = 0;
  int64_t max_context = 0;      // positions a sequence may have
  int64_t max_draft_top_k = 0;  // 0: there is no drafter
  int64_t max_logprobs = 0;
};

struct PlannedOp {
  enum class Kind { kCreate, kFork, kFree };
  Kind kind = Kind::kCreate;
  SequenceId id = 0;
  SequenceId parent = 0;        // fork
  int64_t length = 0;           // fork
  int64_t expected_tokens = 0;  // create, fork
  SamplingParams sampling;      // create, fork
};

// A prefill chunk (a chain whose rows are all kept) or a tree.
struct PlannedSequence {
  SequenceId id = 0;
  bool tree = false;
  int64_t start = 0;             // position of the first row
  std::vector<int32_t> tokens;   // a row each
  std::vector<int32_t> parents;  // trees: node index, root -1
  std::vector<int32_t> depths;   // trees: 0 for the root
  bool sample = false;           // chunks: draw behind the last row
  int64_t draft_top_k = 0;
  int64_t prompt_logprobs = 0;  // chunks
  int32_t next_token = -1;      // chunks: known token behind the last row

  int64_t rows() const { return static_cast<int64_t>(tokens.size()); }
  // Position of row i.
  int64_t Position(int64_t i) const { return start + (tree ? depths[i] : i); }
  // Row i's logits are needed.
  bool NeedsLogits(int64_t i) const { return tree || prompt_logprobs > 0 || (sample && i + 1 == rows()); }
};

struct StepPlan {
  std::vector<PlannedOp> ops;
  std::vector<PlannedSequence> sequences;  // chunks, then trees
};

// INVALID_ARGUMENT, NOT_FOUND or OUT_OF_RANGE naming the field: ids, starts, token ids, parents, sampling
// parameters and sizes. `pool` is the state before the step.
absl::StatusOr<StepPlan> PlanStep(const v1::StepRequest& request, const StepLimits& limits,
                                  const KvPool& pool);

}  // namespace kdt
