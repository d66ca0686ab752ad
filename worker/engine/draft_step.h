// The drafter's part of a step: context K/V of the rows that were kept, then a block for every sequence that
// asks for one. The Fill functions write the host's side of arrays at fixed addresses, the Ops functions only
// queue work that reads them and may be captured.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/draft/draft_top_k.h"
#include "worker/draft/drafter.h"
#include "worker/engine/observer.h"
#include "worker/engine/slot_tables.h"
#include "worker/engine/staged_block.h"
#include "worker/kv_pool/kv_pool.h"

namespace kdt {

// A row of the step that was kept.
struct KeptRow {
  int32_t row;
  int32_t position;
  int32_t slot;
  int64_t request;  // its sequence's place in the first pass; -1: none
};

// A block to draft behind a new root, whose position is the sequence's committed length.
struct DraftRequest {
  SequenceId id = 0;
  int32_t root = 0;
  int64_t top_k = 0;
  int64_t start = 0;  // committed positions before the step
};

class DraftStep {
 public:
  // `drafter` outlives the object. window: context positions a block sees, counted from its end; 0: all.
  static absl::StatusOr<std::unique_ptr<DraftStep>> Create(kernels::Backend* backend, Drafter* drafter,
                                                           Shard shard, int64_t vocab_size, int64_t max_rows,
                                                           int64_t max_sequences, int64_t table_stride,
                                                           int64_t window, EngineObserver* observer);

  // Sequences of a pass.
  int64_t max_sequences() const { return max_sequences_; }
  SlotTables& tables() { return tables_; }

  // Padding up to `shape_rows`.
  void FillKept(std::span<const KeptRow> kept, int64_t shape_rows);
  absl::Status KeptOps(int64_t shape_rows, Collective& collective);

  // One pass. `first`: the slots of the rows kept in this step come from FillKept's list.
  absl::Status FillDraft(std::span<const DraftRequest> requests, const KvPool& pool, int64_t shape_sequences,
                         bool first);
  absl::Status DraftOps(int64_t shape_sequences, int64_t top_k, Collective& collective);
  // When that is done: appends an entry a request, block_size - 1 rows of its top_k candidates each.
  void Merge(std::span<const DraftRequest> requests, int64_t shape_sequences, int64_t top_k,
             std::vector<DraftCandidates>* out) const;

 private:
  DraftStep() = default;

  kernels::Backend* backend_ = nullptr;
  Drafter* drafter_ = nullptr;
  int64_t max_sequences_ = 0;
  int64_t window_ = 0;
  EngineObserver* observer_ = nullptr;
  std::unique_ptr<DraftTopK> top_k_;
  SlotTables tables_;
  StagedBlock context_;  // of the kept rows
  Staged<int32_t> kept_rows_, kept_positions_, kept_slots_;
  Staged<int64_t> table_index_;
  StagedBlock blocks_;  // of a pass
  Staged<int32_t> tokens_, positions_, context_length_, window_begin_, mask_rows_;
};

}  // namespace kdt
