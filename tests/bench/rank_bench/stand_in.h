// Collectives of a rank whose group is not there: the ipc kernels of the worker, with blocks of local memory
// in the place of the other ranks' and their flags set for good. So the kernels, their traffic and their
// place in the step's graphs are real; the way to other GPUs is not.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kdt/kernels/backend.h"
#include "worker/collective/collective.h"

namespace kdt::bench {

// The other ranks' values are zeros, so a sum is this rank's part.
absl::StatusOr<std::unique_ptr<Collective>> MakeStandIn(kernels::Backend* backend, int rank, int size);

// Microseconds of one AllReduceNorm of [rows, cols], by a captured graph of many.
absl::StatusOr<double> MeasureReduceNorm(Collective& collective, kernels::Backend& backend, int64_t rows,
                                         int64_t cols);

}  // namespace kdt::bench
