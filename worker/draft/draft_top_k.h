// The drafter's best tokens a position, with log-probabilities over the whole vocabulary, from logits that
// are cut among the ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kdt/kernels/backend.h"
#include "worker/collective/collective.h"
#include "worker/model/shard.h"
#include "worker/sampling/vocab_gather.h"

namespace kdt {

// Row-major [rows, k], best first; ties: lower id. A row with a NaN or infinity is `bad`.
struct DraftCandidates {
  int64_t k = 0;
  std::vector<int32_t> ids;
  std::vector<float> log_probs;
  std::vector<uint8_t> bad;
};

class DraftTopK {
 public:
  static absl::StatusOr<std::unique_ptr<DraftTopK>> Create(kernels::Backend* backend, Shard shard,
                                                           int64_t vocab_size, int64_t max_rows);
  // logits: f32 [rows, vocab_local]; k: 1 .. min(kMaxTopK, vocabulary).
  absl::Status Run(const kernels::Tensor& logits, int64_t k, Collective& collective, DraftCandidates* out);

 private:
  DraftTopK(kernels::Backend* backend, Shard shard, int64_t vocab_size)
      : backend_(backend), shard_(shard), vocab_size_(vocab_size), gather_(backend) {}

  kernels::Backend* backend_;
  Shard shard_;
  int64_t vocab_size_;
  kernels::Buffer max_, sum_exp_, bad_, ids_, values_;
  std::vector<float> host_max_, host_sum_, host_values_;
  std::vector<uint8_t> host_bad_;
  std::vector<int32_t> host_ids_;
  std::vector<uint32_t> words_;
  WordGather gather_;
};

}  // namespace kdt
