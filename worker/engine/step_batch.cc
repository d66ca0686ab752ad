#include "worker/engine/step_batch.h"

#include <algorithm>

#include "common/status.h"

namespace kdt {

using kernels::kAncestorWords;

absl::Status StepBatch::Allocate(kernels::Backend& backend, const StepLimits& limits, int64_t table_stride) {
  for (Staged<int32_t>* array : {&tokens_, &positions_, &slots_, &logit_rows_array_, &iota_array_}) {
    *array = block_.Reserve<int32_t>(limits.max_rows);
  }
  row_begin_array_ = block_.Reserve<int32_t>(limits.max_sequences + 1);
  context_length_ = block_.Reserve<int32_t>(limits.max_sequences);
  causal_ = block_.Reserve<uint8_t>(limits.max_sequences);
  ancestors_ = block_.Reserve<uint64_t>(limits.max_rows * kAncestorWords);
  KDT_RETURN_IF_ERROR(block_.Allocate(backend));
  for (int64_t i = 0; i < limits.max_rows; ++i) block_.host(iota_array_)[i] = static_cast<int32_t>(i);

  rows_.tokens = block_.device(tokens_);
  rows_.positions = block_.device(positions_);
  rows_.slots = block_.device(slots_);
  rows_.row_begin = block_.device(row_begin_array_);
  rows_.context_length = block_.device(context_length_);
  rows_.causal = block_.device(causal_);
  rows_.ancestor_bits = block_.device(ancestors_);
  KDT_RETURN_IF_ERROR(tables_.Allocate(backend, limits.max_sequences, table_stride));
  rows_.slot_table = tables_.data();
  rows_.table_stride = tables_.stride();
  return absl::OkStatus();
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

absl::Status StepBatch::Fill(std::span<const PlannedSequence> sequences, const KvPool& pool) {
  row_begin_.clear();
  logit_begin_.clear();
  logit_rows_.clear();
  int64_t row = 0;
  for (size_t s = 0; s < sequences.size(); ++s) {
    const PlannedSequence& sequence = sequences[s];
    const auto table = pool.Table(sequence.id);
    KDT_CHECK(static_cast<int64_t>(table.size()) == sequence.start + sequence.rows());
    row_begin_.push_back(row);
    logit_begin_.push_back(static_cast<int64_t>(logit_rows_.size()));
    block_.host(row_begin_array_)[s] = static_cast<int32_t>(row);
    block_.host(context_length_)[s] = static_cast<int32_t>(sequence.start);
    block_.host(causal_)[s] = sequence.tree ? 0 : 1;
    KDT_RETURN_IF_ERROR(tables_.Set(s, {table.data(), table.size()}));
    if (sequence.tree) FillAncestors(sequence, row);
    for (int64_t i = 0; i < sequence.rows(); ++i, ++row) {
      block_.host(tokens_)[row] = sequence.tokens[i];
      block_.host(positions_)[row] = static_cast<int32_t>(sequence.Position(i));
      block_.host(slots_)[row] = table[sequence.start + i];
      if (!sequence.NeedsLogits(i)) continue;
      block_.host(logit_rows_array_)[logit_rows_.size()] = static_cast<int32_t>(row);
      logit_rows_.push_back(static_cast<int32_t>(row));
    }
  }
  block_.host(row_begin_array_)[sequences.size()] = static_cast<int32_t>(row);
  rows_.rows = row;
  rows_.sequences = static_cast<int64_t>(sequences.size());
  return block_.Upload();
}

}  // namespace kdt
