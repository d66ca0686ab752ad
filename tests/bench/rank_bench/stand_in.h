// Collectives of a rank whose group is not there: the ipc kernels of the worker, with blocks of local memory
// in the place of the other ranks' and their flags set for good. So the kernels, their traffic and their
// place in the step's graphs are real; the way to other GPUs is time that passes in each meeting.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kdt/kernels/backend.h"
#include "worker/collective/collective.h"

namespace kdt::bench {

class StandIn : public Collective {
 public:
  // From now on the other ranks come to a meeting so much later than this one, whatever has been captured.
  virtual absl::Status BeLate(uint32_t ns) = 0;
};

// The other ranks' values are zeros, so a sum is this rank's part.
absl::StatusOr<std::unique_ptr<StandIn>> MakeStandIn(kernels::Backend* backend, int rank, int size);

// Lets the others be so late that an AllReduceNorm of [rows, cols] by itself takes `us`; less cannot be had
// where it takes longer anyway.
absl::Status LastFor(StandIn& stand_in, kernels::Backend& backend, int64_t rows, int64_t cols, double us);

// Microseconds of one AllReduceNorm of [rows, cols], by a captured graph of many.
absl::StatusOr<double> MeasureReduceNorm(Collective& collective, kernels::Backend& backend, int64_t rows,
                                         int64_t cols);

}  // namespace kdt::bench
