// Capture of a stream's work into a graph.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kdt/kernels/backend.h"

namespace kdt::cuda {

// Records what `record` queues on `stream`. `replays` is counted up by every replay; it and the stream
// outlive the graph. The stream is free for other work again whatever comes of it.
absl::StatusOr<std::unique_ptr<kernels::Graph>> CaptureGraph(cudaStream_t stream,
                                                             absl::FunctionRef<absl::Status()> record,
                                                             int64_t* replays);

}  // namespace kdt::cuda
