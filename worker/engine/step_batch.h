// The rows of a step in the backend's memory: what the target's forward reads (filled before it), and what
// commit and the drafter read (filled behind the walk).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kdt/kernels/backend.h"
#include "worker/engine/slot_tables.h"
#include "worker/engine/staged_block.h"
#include "worker/engine/step_plan.h"
#include "worker/engine/target_forward.h"
#include "worker/kv_pool/kv_pool.h"

namespace kdt {

class StepBatch {
 public:
  absl::Status Allocate(kernels::Backend& backend, const StepLimits& limits, int64_t table_stride);

  // Lays the sequences' rows out one behind the other and uploads everything. Their tentative rows are in
  // `pool`.
  absl::Status Fill(std::span<const PlannedSequence> sequences, const KvPool& pool);

  const StepRows& rows() const { return rows_; }
  int64_t row_begin(size_t sequence) const { return row_begin_[sequence]; }
  // Rows whose logits are needed, rising, and the same in the backend's memory.
  const std::vector<int32_t>& logit_rows() const { return logit_rows_; }
  const int32_t* device_logit_rows() const { return block_.device(logit_rows_array_); }
  const int32_t* iota() const { return block_.device(iota_array_); }  // 0, 1, ... max_rows - 1
  // First of a sequence's rows in the list of logit rows.
  int64_t logit_begin(size_t sequence) const { return logit_begin_[sequence]; }

 private:
  void FillAncestors(const PlannedSequence& sequence, int64_t begin);

  StagedBlock block_;
  Staged<int32_t> tokens_, positions_, slots_, row_begin_array_, context_length_, logit_rows_array_,
      iota_array_;
  Staged<uint8_t> causal_;
  Staged<uint64_t> ancestors_;
  SlotTables tables_;
  StepRows rows_;
  std::vector<int64_t> row_begin_, logit_begin_;
  std::vector<int32_t> logit_rows_;
};

}  // namespace kdt
