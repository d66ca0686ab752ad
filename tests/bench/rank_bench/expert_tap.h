// Which experts a step's rows were sent to, layer by layer: what the floor must count.
#pragma once

#include <cstdint>
#include <set>

#include "absl/status/status.h"
#include "common/status.h"
#include "kdt/kernels/backend.h"

namespace kdt::bench {

class ExpertTap {
 public:
  // Room for `layers` choices of `max_rows` rows.
  absl::Status Allocate(kernels::Backend& backend, int64_t layers, int64_t max_rows, int64_t top_k) {
    layers_ = layers;
    top_k_ = top_k;
    stride_ = max_rows * top_k;
    KDT_ASSIGN_OR_RETURN(host_, kernels::HostBuffer::Make(backend, layers * stride_ * sizeof(int32_t)));
    return absl::OkStatus();
  }

  // A step, or the recording of a graph, begins.
  void Begin() { next_ = 0; }
  // Queues a copy of the `count` ids that a layer's rows just chose.
  absl::Status Take(kernels::Backend& backend, const int32_t* chosen, int64_t count) {
    if (next_ == layers_ || count > stride_) return absl::OkStatus();
    return backend.DownloadAsync(ids() + next_++ * stride_, chosen, count * sizeof(int32_t));
  }

  // Distinct experts of the last step's first `rows` rows, mean over the layers.
  double Distinct(int64_t rows) const {
    size_t sum = 0;
    for (int64_t layer = 0; layer < layers_; ++layer) {
      const int32_t* first = ids() + layer * stride_;
      std::set<int32_t> distinct(first, first + rows * top_k_);
      distinct.erase(-1);
      sum += distinct.size();
    }
    return static_cast<double>(sum) / static_cast<double>(layers_);
  }

 private:
  int32_t* ids() const { return reinterpret_cast<int32_t*>(host_.data()); }

  kernels::HostBuffer host_;
  int64_t layers_ = 0, top_k_ = 0, stride_ = 0, next_ = 0;
};

}  // namespace kdt::bench
