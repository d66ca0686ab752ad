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

  // Queues the search, the gathering from all ranks and the copy to the host; may be captured.
  // logits: f32 [rows, vocab_local]; k: 1 .. min(kMaxTopK, vocabulary).
  absl::Status Queue(const kernels::Tensor& logits, int64_t k, Collective& collective);
  // Once that is done: the best `k` (at most what was queued) of rows [begin, end) of the `queued_rows`.
  DraftCandidates Merge(int64_t queued_rows, int64_t queued_k, int64_t begin, int64_t end, int64_t k) const;

 private:
  // Where a rank's results of `rows` rows lie behind each other, in bytes: maxima, sums, bad marks, ids,
  // values.
  struct Layout {
    Layout(int64_t rows, int64_t k);
    size_t sum, bad, ids, values, size;
  };
  DraftTopK(kernels::Backend* backend, Shard shard, int64_t vocab_size)
      : backend_(backend), shard_(shard), vocab_size_(vocab_size) {}
  int64_t LocalK(int64_t k) const;

  kernels::Backend* backend_;
  Shard shard_;
  int64_t vocab_size_;
  kernels::Buffer mine_, all_;
  kernels::HostBuffer host_;
};

}  // namespace kdt
