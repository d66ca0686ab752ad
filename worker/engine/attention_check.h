// Verify attention as --attention says: by the fast kernel, by the plain reference, or by both on a sample of
// steps, whose results are compared (and the fast one is used).
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kdt/kernels/backend.h"

namespace kdt {

enum class AttentionMode { kFast, kReference, kValidate };

// What validated steps found since the start; distances as in kdt/kernels/compare.h.
struct AttentionErrors {
  uint64_t values = 0;
  uint64_t beyond_ulp = 0;      // of them more than one bf16 ulp of their own away
  uint64_t beyond_row_ulp = 0;  // more than one ulp of the row's largest value
  float largest_ulps = 0;
  float largest_row_ulps = 0;
};

class AttentionCheck {
 public:
  // Validates steps whose number is a multiple of `every`: the same ones on every rank. `width`: values a row
  // that attention writes. All memory is taken here.
  static absl::StatusOr<std::unique_ptr<AttentionCheck>> Create(kernels::Backend* backend, AttentionMode mode,
                                                                int64_t every, int64_t max_rows,
                                                                int64_t width);
  ~AttentionCheck();
  AttentionCheck(const AttentionCheck&) = delete;
  AttentionCheck& operator=(const AttentionCheck&) = delete;

  // Whether Run compares from now on. Such a step runs op by op: its ops are not those of a captured graph.
  bool BeginStep(uint64_t step);
  // One layer's attention.
  absl::Status Run(const kernels::VerifyAttentionArgs& args);
  // Behind the last layer: queues the copy that errors() reads once the step is finished.
  absl::Status EndStep();

  AttentionErrors errors() const;

 private:
  AttentionCheck(kernels::Backend* backend, AttentionMode mode, int64_t every)
      : backend_(backend), mode_(mode), every_(every) {}

  kernels::Backend* const backend_;
  const AttentionMode mode_;
  const int64_t every_;
  bool comparing_ = false;
  // Of kValidate alone.
  kernels::Buffer reference_;                // [max_rows, width]
  kernels::Buffer stats_;                    // CompareStats, summed on the device
  kernels::CompareStats* copied_ = nullptr;  // page-locked
};

}  // namespace kdt
