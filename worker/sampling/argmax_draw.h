// The draw of rows that need no more than argmax(logit / temperature + noise): on the device, with one record
// a row gathered from all ranks and copied to page-locked memory. It only queues work, so it can be captured;
// the host merges the records when they are there. Same result as Sampler for such rows.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kdt/kernels/backend.h"
#include "worker/collective/collective.h"
#include "worker/model/shard.h"
#include "worker/sampling/sampler.h"

namespace kdt {

// Whether a row's draw is of that kind.
bool DrawsByArgmax(const SampleRow& row);

class ArgmaxDraw {
 public:
  static absl::StatusOr<std::unique_ptr<ArgmaxDraw>> Create(kernels::Backend* backend, Shard shard,
                                                            int64_t vocab_size, int64_t max_rows);

  // Of each row of logits (f32 [rows, vocab_local]); all pointers are the backend's memory.
  struct Keys {
    const float* temperature;
    const uint64_t* seed;
    const int64_t* position;  // of the token to be drawn
  };
  absl::Status Queue(const kernels::Tensor& logits, const Keys& keys, Collective& collective);

  // Once the work is done: the first `rows` rows of the `queued` ones.
  void Merge(int64_t queued, int64_t rows, std::vector<SampledRow>* out) const;

 private:
  ArgmaxDraw(kernels::Backend* backend, Shard shard, int64_t vocab_size)
      : backend_(backend), shard_(shard), vocab_size_(vocab_size) {}

  kernels::Backend* backend_;
  Shard shard_;
  int64_t vocab_size_;
  kernels::Buffer mine_, all_;  // records: ids, then values, then bad marks, of the rows queued
  kernels::HostBuffer host_;
};

}  // namespace kdt
