#include "worker/engine/step_graphs.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace kdt {
namespace {

constexpr int64_t kRowBuckets[] = {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024};
constexpr int64_t kRowsStep = 1024;  // above the last of them
constexpr int64_t kSequencesFactor = 4;

const char* Name(StepPiece piece) {
  switch (piece) {
    case StepPiece::kForward:
      return "forward";
    case StepPiece::kLogits:
      return "logits";
    case StepPiece::kKept:
      return "kept rows";
    case StepPiece::kDraft:
      return "draft";
  }
  return "";
}

}  // namespace

StepGraphs::StepGraphs(kernels::Backend* backend, StepMode mode, int64_t max_rows, int64_t max_sequences)
    : backend_(backend),
      captures_(mode == StepMode::kAuto && backend->can_capture()),
      pads_(captures_ || mode == StepMode::kEager),
      max_sequences_(max_sequences) {
  for (const int64_t rows : kRowBuckets) {
    if (rows < max_rows) row_buckets_.push_back(rows);
  }
  for (int64_t rows = 2 * kRowsStep; rows < max_rows; rows += kRowsStep) row_buckets_.push_back(rows);
  row_buckets_.push_back(max_rows);
}

int64_t StepGraphs::Rows(int64_t count) const {
  if (!pads_) return count;
  KDT_CHECK(count <= row_buckets_.back());
  return *std::lower_bound(row_buckets_.begin(), row_buckets_.end(), count);
}

std::vector<int64_t> StepGraphs::SequenceBuckets(int64_t rows) const {
  const int64_t most = std::min(rows, max_sequences_);
  std::vector<int64_t> buckets;
  for (int64_t count = 1; count < most; count *= kSequencesFactor) buckets.push_back(count);
  buckets.push_back(most);
  return buckets;
}

int64_t StepGraphs::Sequences(int64_t count, int64_t rows) const {
  if (!pads_) return count;
  const int64_t most = std::min(rows, max_sequences_);
  KDT_CHECK(count <= most);
  int64_t bucket = 1;
  while (bucket < count) bucket *= kSequencesFactor;
  return std::min(bucket, most);
}

absl::Status StepGraphs::Capture(StepPiece piece, int64_t rows, int64_t sequences,
                                 absl::FunctionRef<absl::Status()> ops) {
  auto graph = backend_->Capture(ops);
  if (!graph.ok()) {
    return absl::Status(graph.status().code(),
                        absl::StrCat("graph of ", Name(piece), " for ", rows, " rows, ", sequences,
                                     " sequences: ", graph.status().message()));
  }
  nodes_ += (*graph)->nodes();
  graphs_[{piece, rows, sequences}] = *std::move(graph);
  return absl::OkStatus();
}

absl::Status StepGraphs::Run(StepPiece piece, int64_t rows, int64_t sequences,
                             absl::FunctionRef<absl::Status()> ops) {
  const auto found = graphs_.find({piece, rows, sequences});
  if (found == graphs_.end()) {
    if (!captures_) return ops();
    // Op by op it would be right and slow, and nobody would know.
    return absl::InternalError(absl::StrCat("no graph of ", Name(piece), " for ", rows, " rows, ", sequences,
                                            " sequences was captured"));
  }
  if (piece == StepPiece::kForward) {
    ++replays_[rows];
    last_forward_ = found->second.get();
  }
  return found->second->Replay();
}

void StepGraphs::Clear() {
  last_forward_ = nullptr;
  graphs_.clear();
  nodes_ = 0;
}

}  // namespace kdt
