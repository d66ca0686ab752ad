// The drafter's part of a step: context K/V of the rows that were kept, then a block for every sequence that
// asks for one.
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
};

// A block to draft behind a new root, whose position is the sequence's committed length.
struct DraftRequest {
  SequenceId id = 0;
  int32_t root = 0;
  int64_t top_k = 0;
};

class DraftStep {
 public:
  // `drafter` outlives the object. window: context positions a block sees, counted from its end; 0: all.
  static absl::StatusOr<std::unique_ptr<DraftStep>> Create(kernels::Backend* backend, Drafter* drafter,
                                                           Shard shard, int64_t vocab_size, int64_t max_rows,
                                                           int64_t table_stride, int64_t window,
                                                           EngineObserver* observer);

  // `all`: the kept rows are all rows of the step.
  absl::Status Append(std::span<const KeptRow> kept, bool all, Collective& collective);
  // `out` gets one entry a request: block_size - 1 rows of top_k candidates each.
  absl::Status Draft(std::span<const DraftRequest> requests, const KvPool& pool, Collective& collective,
                     std::vector<DraftCandidates>* out);

 private:
  DraftStep() = default;
  absl::Status DraftSome(std::span<const DraftRequest> requests, const KvPool& pool, Collective& collective,
                         std::vector<DraftCandidates>* out);

  Drafter* drafter_ = nullptr;
  int64_t window_ = 0;
  EngineObserver* observer_ = nullptr;
  std::unique_ptr<DraftTopK> top_k_;
  SlotTables tables_;
  StagedBlock context_;  // of Append
  Staged<int32_t> kept_rows_, kept_positions_, kept_slots_, kept_iota_;
  StagedBlock blocks_;  // of Draft
  Staged<int32_t> tokens_, positions_, context_length_, window_begin_, mask_rows_, iota_;
  DraftCandidates merged_;
};

}  // namespace kdt
