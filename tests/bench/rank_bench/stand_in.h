// Collectives of a rank whose group is not there: the traffic of the one-shot kernels, with local memory in
// the place of the other ranks', and the time that real peers would take.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kdt/kernels/backend.h"
#include "worker/collective/collective.h"

namespace kdt::bench {

// A reduction reads `size` buffers as large as the tensor and takes at least `microseconds`; the others hold
// zeros, so the result is this rank's part. A gather repeats this rank's bytes. Everything is only queued.
absl::StatusOr<std::unique_ptr<Collective>> MakeStandIn(kernels::Backend* backend, int rank, int size,
                                                        double microseconds);

}  // namespace kdt::bench
