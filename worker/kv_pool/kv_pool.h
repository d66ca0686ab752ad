// Bookkeeping of one rank's KV pool: which slots hold which positions of which sequence. It holds no
// K/V itself: the engine owns the pools (target and drafter share slots) and applies the moves that this
// class returns. Deterministic: the same calls give the same tables on every rank, proven by digest().
//
// Slot 0 is the padding slot: never allocated, read by padding rows.
// A sequence has `committed` positions and, between BeginRows and Commit, tentative rows behind them (tree
// nodes or a prefill chunk's tokens).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace kdt {

using SequenceId = uint64_t;

struct SlotMove {
  int32_t from;
  int32_t to;
};

struct KvPoolStats {
  int64_t slots_total = 0;   // slot 0 not counted
  int64_t slots_used = 0;    // with at least one reference, tentative ones included
  int64_t slots_shared = 0;  // with more than one
  int64_t sequences = 0;
  int64_t runs = 0;          // contiguous runs over all tables
  double fragmentation = 0;  // 1 - largest free extent / free slots; 0 when nothing is free
  int64_t moved_rows = 0;    // since start
};

class KvPool {
 public:
  // slots: 1 .. 2^31 - 1 usable slots (ids 1 .. slots). max_context: longest table.
  static absl::StatusOr<std::unique_ptr<KvPool>> Create(int64_t slots, int64_t max_sequences,
                                                        int64_t max_context);
  virtual ~KvPool() = default;

  // INVALID_ARGUMENT: the id is alive; RESOURCE_EXHAUSTED: too many sequences. `expected_tokens` is a hint:
  // the allocator looks for an extent with that much room so that the sequence can grow in place.
  virtual absl::Status CreateSequence(SequenceId id, int64_t expected_tokens) = 0;
  // Shares the first `length` committed slots of `parent`. NOT_FOUND; OUT_OF_RANGE: length over parent's
  // committed.
  virtual absl::Status ForkSequence(SequenceId id, SequenceId parent, int64_t length,
                                    int64_t expected_tokens) = 0;
  virtual absl::Status FreeSequence(SequenceId id) = 0;
  // Drops everything (a new epoch).
  virtual void Clear() = 0;

  // Allocates `rows` tentative slots behind the committed ones. RESOURCE_EXHAUSTED (nothing changed) when
  // fewer are free; OUT_OF_RANGE when the context limit would be passed.
  virtual absl::Status BeginRows(SequenceId id, int64_t rows) = 0;
  // Keeps the tentative rows `kept` (row indices, strictly rising), drops the others. Appends to `moves` the
  // row copies that make the kept rows the sequence's next positions in place: to <= from in table order,
  // safe in order.
  virtual absl::Status Commit(SequenceId id, absl::Span<const int32_t> kept,
                              std::vector<SlotMove>* moves) = 0;

  // Tier 1: moves rows of the most fragmented sequences into one run each, at most `max_rows` rows in all,
  // and switches every table that names a moved slot. Only between steps. The moves must be applied before
  // the next forward; sources and targets do not overlap.
  virtual std::vector<SlotMove> Relocate(int64_t max_rows) = 0;

  // position -> slot for committed and tentative rows. NOT_FOUND as an empty span is impossible for a live
  // id: check Alive.
  virtual bool Alive(SequenceId id) const = 0;
  virtual absl::Span<const int32_t> Table(SequenceId id) const = 0;
  virtual int64_t Committed(SequenceId id) const = 0;

  virtual int64_t FreeSlots() const = 0;
  virtual uint64_t digest() const = 0;  // of all tables and reference counts
  virtual KvPoolStats stats() const = 0;
  virtual int64_t max_context() const = 0;
};

}  // namespace kdt
