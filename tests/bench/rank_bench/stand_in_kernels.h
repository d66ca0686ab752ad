// Kernels of the stand-in collective. They end no sooner than `nanoseconds` after their start.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kdt/kernels/tensor.h"

namespace kdt::bench {

// x = float32 sum of x and of peers - 1 tensors like it in `others`.
cudaError_t StandInReduce(cudaStream_t stream, const kernels::Tensor& x, const void* others, int peers,
                          int64_t nanoseconds);
// `peers` copies of `in` (bytes a multiple of 4).
cudaError_t StandInGather(cudaStream_t stream, const void* in, size_t bytes, void* out, int peers,
                          int64_t nanoseconds);

}  // namespace kdt::bench
