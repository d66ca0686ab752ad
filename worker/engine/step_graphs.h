// The captured graphs of a step, and the row counts they exist for.
//
// A step's ops come in four pieces, each captured once per bucket at the start of an epoch (the collective's
// addresses are inside): the forward over all rows, the logits with their draw, what is kept (moved KV rows
// and the drafter's context), and a draft pass. Everything that changes from step to step lies in device
// buffers of fixed address. A piece has the shape of the smallest bucket that holds it; what lies beyond the
// real rows is padding, which the pieces define.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kdt/kernels/backend.h"

namespace kdt {

enum class StepMode {
  kAuto,   // graphs where the backend captures, else exact shapes
  kEager,  // the shapes of the buckets, op by op
  kExact,  // the step's own shapes, op by op
};

enum class StepPiece { kForward, kLogits, kKept, kDraft };

class StepGraphs {
 public:
  StepGraphs(kernels::Backend* backend, StepMode mode, int64_t max_rows, int64_t max_sequences);

  bool captures() const { return captures_; }
  bool pads() const { return pads_; }  // shapes are those of the buckets

  // The shape that `count` rows (1 .. max_rows) take: `count` itself where nothing is padded.
  int64_t Rows(int64_t count) const;
  // The same for sequences of a piece of `rows` rows: few sequences get a shape of their own, because
  // attention cuts its work by the rows a sequence has.
  int64_t Sequences(int64_t count, int64_t rows) const;
  // Every shape there is: rows rising; and for one of them the sequences, rising.
  const std::vector<int64_t>& row_buckets() const { return row_buckets_; }
  std::vector<int64_t> SequenceBuckets(int64_t rows) const;

  // Records `ops` for later. Errors name the piece and the shape.
  absl::Status Capture(StepPiece piece, int64_t rows, int64_t sequences,
                       absl::FunctionRef<absl::Status()> ops);
  // Replays what was captured for the shape. Without captures() calls `ops`; with it a shape that was not
  // captured is an INTERNAL error that names it.
  absl::Status Run(StepPiece piece, int64_t rows, int64_t sequences, absl::FunctionRef<absl::Status()> ops);
  void Clear();

  int64_t graphs() const { return static_cast<int64_t>(graphs_.size()); }
  int64_t nodes() const { return nodes_; }
  // Replays of the forward since start, by its rows.
  const std::map<int64_t, int64_t>& replays() const { return replays_; }
  // The forward's graph that ran last; nullptr: none.
  const kernels::Graph* last_forward() const { return last_forward_; }

 private:
  kernels::Backend* backend_;
  bool captures_;
  bool pads_;
  int64_t max_sequences_;
  std::vector<int64_t> row_buckets_;
  std::map<std::tuple<StepPiece, int64_t, int64_t>, std::unique_ptr<kernels::Graph>> graphs_;
  int64_t nodes_ = 0;
  std::map<int64_t, int64_t> replays_;
  const kernels::Graph* last_forward_ = nullptr;
};

}  // namespace kdt
