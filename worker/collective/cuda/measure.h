// Times of reductions in captured graphs, as a step has them.
#pragma once

#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "worker/collective/choice.h"

namespace kdt {

class CudaCollective;

// Microseconds of one call, for this rank: median over `replays` of a graph of `calls` calls. Every rank
// calls it.
absl::StatusOr<float> MeasureCalls(CudaCollective& collective, int calls, int replays,
                                   absl::FunctionRef<absl::Status()> call);

// The same for a reduction of `bytes` (bf16) by `method`.
absl::StatusOr<float> MeasureReduce(CudaCollective& collective, ReduceMethod method, void* x, size_t bytes,
                                    int calls, int replays);

// What a new group measures to choose by: 8 KiB to 4 MiB (or `largest`) by all methods it has; rank 0's
// times, on all ranks. Empty when a single small reduction takes so long that measuring would hold up the
// start.
absl::StatusOr<std::vector<ReduceTimes>> MeasureChoice(CudaCollective& collective, size_t largest);

}  // namespace kdt
