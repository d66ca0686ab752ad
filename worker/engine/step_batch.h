// The rows of a step in the backend's memory: what the target's forward, its logits and the draw read. The
// arrays lie at fixed addresses; Fill writes the host's side, Upload (the first op of the forward) copies it.
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
#include "worker/sampling/argmax_draw.h"

namespace kdt {

class StepBatch {
 public:
  absl::Status Allocate(kernels::Backend& backend, const StepLimits& limits, int64_t table_stride);

  // Counts of what a list of sequences brings.
  struct Counts {
    int64_t rows = 0;
    int64_t logit_rows = 0;
  };
  static Counts Count(std::span<const PlannedSequence> sequences);

  // Lays the sequences' rows out one behind the other, then padding up to `shape_rows` rows,
  // `shape_sequences` sequences and `shape_logit_rows` logit rows. Their tentative rows are in `pool`.
  absl::Status Fill(std::span<const PlannedSequence> sequences, const KvPool& pool, int64_t shape_rows,
                    int64_t shape_sequences, int64_t shape_logit_rows);
  // Of logit row i.
  void SetDraw(int64_t i, float temperature, uint64_t seed, int64_t position);

  // Queues the copy, and writes the rows' own slots into the tables. All rows of the shape.
  absl::Status Upload(int64_t shape_rows);
  // Forgets and EndStep as SlotTables says.
  SlotTables& tables() { return tables_; }

  // What the forward of a shape reads.
  StepRows Rows(int64_t shape_rows, int64_t shape_sequences) const;
  int64_t row_begin(size_t sequence) const { return row_begin_[sequence]; }
  int64_t rows() const { return counts_.rows; }
  int64_t logit_rows() const { return counts_.logit_rows; }
  const int32_t* device_logit_rows() const { return block_.device(logit_rows_); }
  ArgmaxDraw::Keys draw_keys() const {
    return {block_.device(temperature_), block_.device(seed_), block_.device(position_)};
  }
  // First of a sequence's rows in the list of logit rows.
  int64_t logit_begin(size_t sequence) const { return logit_begin_[sequence]; }

 private:
  void FillAncestors(const PlannedSequence& sequence, int64_t begin);

  kernels::Backend* backend_ = nullptr;
  StagedBlock block_;
  Staged<int32_t> tokens_, positions_, slots_, logit_rows_, row_begin_array_, context_length_;
  Staged<uint8_t> causal_;
  Staged<uint64_t> ancestors_, seed_;
  Staged<int64_t> table_index_, position_;
  Staged<float> temperature_;
  SlotTables tables_;
  Counts counts_;
  std::vector<int64_t> row_begin_, logit_begin_;
};

}  // namespace kdt
