#include "worker/engine/step_batch.h"

#include <algorithm>

#include "common/status.h"

namespace kdt {

using kernels::kAncestorWords;

absl::Status StepBatch::Allocate(kernels::Backend& backend, const StepLimits& limits, int64_t table_stride) {
  backend_ = &backend;
  for (Staged<int32_t>* array : {&tokens_, &positions_, &slots_, &logit_rows_}) {
    *array = block_.Reserve<int32_t>(limits.max_rows);
  }
  row_begin_array_ = block_.Reserve<int32_t>(limits.max_sequences + 1);
  context_length_ = block_.Reserve<int32_t>(limits.max_sequences);
  causal_ = block_.Reserve<uint8_t>(limits.max_sequences);
  ancestors_ = block_.Reserve<uint64_t>(limits.max_rows * kAncestorWords);
  table_index_ = block_.Reserve<int64_t>(limits.max_rows);
  temperature_ = block_.Reserve<float>(limits.max_rows);
  seed_ = block_.Reserve<uint64_t>(limits.max_rows);
  position_ = block_.Reserve<int64_t>(limits.max_rows);
  KDT_RETURN_IF_ERROR(block_.Allocate(backend));
  return tables_.Allocate(backend, limits.max_sequences, table_stride);
}

StepRows StepBatch::Rows(int64_t shape_rows, int64_t shape_sequences) const {
  StepRows rows;
  rows.rows = shape_rows;
  rows.sequences = shape_sequences;
  rows.tokens = block_.device(tokens_);
  rows.positions = block_.device(positions_);
  rows.slots = block_.device(slots_);
  rows.row_begin = block_.device(row_begin_array_);
  rows.context_length = block_.device(context_length_);
  rows.causal = block_.device(causal_);
  rows.ancestor_bits = block_.device(ancestors_);
  rows.slot_table = tables_.data();
  rows.table_stride = tables_.stride();
  return rows;
}

absl::Status StepBatch::Upload(int64_t shape_rows) {
  KDT_RETURN_IF_ERROR(block_.Upload());
  return backend_->TableWrite(
      {block_.device(table_index_), block_.device(slots_), shape_rows, tables_.data()});
}

// Bit j of a node's row: node j is its ancestor or the node itself. A parent comes before its children.
void StepBatch::FillAncestors(const PlannedSequence& sequence, int64_t begin) {
  uint64_t* bits = block_.host(ancestors_) + begin * kAncestorWords;
  for (int64_t i = 0; i < sequence.rows(); ++i) {
    uint64_t* row = bits + i * kAncestorWords;
    if (sequence.parents[i] < 0) {
      std::fill_n(row, kAncestorWords, 0);
    } else {
      std::copy_n(bits + sequence.parents[i] * kAncestorWords, kAncestorWords, row);
    }
    row[i / 64] |= uint64_t{1} << (i % 64);
  }
}

StepBatch::Counts StepBatch::Count(std::span<const PlannedSequence> sequences) {
  Counts counts;
  for (const PlannedSequence& sequence : sequences) {
    counts.rows += sequence.rows();
    for (int64_t i = 0; i < sequence.rows(); ++i) counts.logit_rows += sequence.NeedsLogits(i) ? 1 : 0;
  }
  return counts;
}

absl::Status StepBatch::Fill(std::span<const PlannedSequence> sequences, const KvPool& pool,
                             int64_t shape_rows, int64_t shape_sequences, int64_t shape_logit_rows) {
  row_begin_.clear();
  logit_begin_.clear();
  int64_t row = 0;
  int64_t logit = 0;
  for (size_t s = 0; s < sequences.size(); ++s) {
    const PlannedSequence& sequence = sequences[s];
    const auto table = pool.Table(sequence.id);
    KDT_CHECK(static_cast<int64_t>(table.size()) == sequence.start + sequence.rows());
    row_begin_.push_back(row);
    logit_begin_.push_back(logit);
    block_.host(row_begin_array_)[s] = static_cast<int32_t>(row);
    block_.host(context_length_)[s] = static_cast<int32_t>(sequence.start);
    block_.host(causal_)[s] = sequence.tree ? 0 : 1;
    KDT_RETURN_IF_ERROR(tables_.Set(s, sequence.id, {table.data(), table.size()}, sequence.start));
    if (sequence.tree) FillAncestors(sequence, row);
    for (int64_t i = 0; i < sequence.rows(); ++i, ++row) {
      block_.host(tokens_)[row] = sequence.tokens[i];
      block_.host(positions_)[row] = static_cast<int32_t>(sequence.Position(i));
      block_.host(slots_)[row] = table[sequence.start + i];
      block_.host(table_index_)[row] = tables_.Index(s, sequence.start + i);
      if (!sequence.NeedsLogits(i)) continue;
      block_.host(logit_rows_)[logit++] = static_cast<int32_t>(row);
    }
  }
  counts_ = {row, logit};
  for (int64_t s = static_cast<int64_t>(sequences.size()); s < shape_sequences; ++s) {
    block_.host(row_begin_array_)[s] = static_cast<int32_t>(counts_.rows);
    block_.host(context_length_)[s] = 0;
    block_.host(causal_)[s] = 1;
  }
  block_.host(row_begin_array_)[shape_sequences] = static_cast<int32_t>(counts_.rows);
  for (; row < shape_rows; ++row) {
    block_.host(tokens_)[row] = 0;
    block_.host(positions_)[row] = 0;
    block_.host(slots_)[row] = -1;
    block_.host(table_index_)[row] = -1;
  }
  for (; logit < shape_logit_rows; ++logit) {
    block_.host(logit_rows_)[logit] = 0;
    SetDraw(logit, 0, 0, 0);
  }
  return absl::OkStatus();
}

void StepBatch::SetDraw(int64_t i, float temperature, uint64_t seed, int64_t position) {
  block_.host(temperature_)[i] = temperature;
  block_.host(seed_)[i] = seed;
  block_.host(position_)[i] = position;
}

}  // namespace kdt
