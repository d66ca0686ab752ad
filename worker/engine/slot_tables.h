// The slot tables of the sequences of a step in the backend's memory, [rows, stride]. A row usually holds the
// same sequence as in the step before, a few slots longer. The slots of the step's own rows are written by
// the step itself (TableWrite, from a list with a fixed address); only what else has changed is copied up
// here.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kdt/kernels/backend.h"

namespace kdt {

class SlotTables {
 public:
  absl::Status Allocate(kernels::Backend& backend, int64_t rows, int64_t stride);

  // Nothing in the device's memory is taken for known any more (tables were switched, ids may come again).
  void Forget();
  // The same when copies of a step that failed may be missing.
  void Clear();

  // Row `row` holds `table`, the table of sequence `id`, from now on; entries from `fresh` on are left to the
  // step. Between two calls of Forget a sequence's table changes behind its committed positions only.
  absl::Status Set(int64_t row, uint64_t id, std::span<const int32_t> table, int64_t fresh);
  // Where TableWrite puts entry `position` of row `row`.
  int64_t Index(int64_t row, int64_t position) const { return row * stride_ + position; }

  // Behind every step, when all its copies are done.
  void EndStep() { staged_ = 0; }

  int32_t* data() const { return device_.as<int32_t>(); }
  int64_t stride() const { return stride_; }

 private:
  struct Row {
    uint64_t id = 0;
    int64_t known = 0;            // leading entries that hold what `mirror` says for sure
    std::vector<int32_t> mirror;  // what lies in the device's memory
  };
  absl::Status CopyUp(int64_t at, std::span<const int32_t> values);

  kernels::Backend* backend_ = nullptr;
  int64_t stride_ = 0;
  std::vector<Row> rows_;
  kernels::Buffer device_;
  kernels::HostBuffer staging_;  // of the copies queued in this step
  int64_t staged_ = 0;           // values
};

}  // namespace kdt
