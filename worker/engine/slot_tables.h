// The slot tables of the sequences of a step in the backend's memory, [sequences, stride]. A row usually
// holds the same sequence as in the step before, a few slots longer, so only what changed is uploaded.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "common/status.h"
#include "kdt/kernels/backend.h"

namespace kdt {

class SlotTables {
 public:
  absl::Status Allocate(kernels::Backend& backend, int64_t sequences, int64_t stride) {
    backend_ = &backend;
    stride_ = stride;
    mirror_.resize(sequences);
    KDT_ASSIGN_OR_RETURN(device_, kernels::Buffer::Make(backend, sequences * stride * sizeof(int32_t)));
    return absl::OkStatus();
  }

  absl::Status Set(int64_t row, std::span<const int32_t> table) {
    std::vector<int32_t>& mirror = mirror_[row];
    const size_t common = std::min(mirror.size(), table.size());
    const size_t same =
        std::mismatch(table.begin(), table.begin() + common, mirror.begin()).first - table.begin();
    if (same == table.size()) return absl::OkStatus();  // what lies behind is not read
    mirror.resize(same);
    mirror.insert(mirror.end(), table.begin() + same, table.end());
    return backend_->Upload(device_.as<int32_t>() + row * stride_ + same, table.data() + same,
                            (table.size() - same) * sizeof(int32_t));
  }

  const int32_t* data() const { return device_.as<int32_t>(); }
  int64_t stride() const { return stride_; }

 private:
  kernels::Backend* backend_ = nullptr;
  int64_t stride_ = 0;
  std::vector<std::vector<int32_t>> mirror_;
  kernels::Buffer device_;
};

}  // namespace kdt
