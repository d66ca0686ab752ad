// The CUDA backend: activations and KV in bf16, every op queued on one stream of one device. Only in builds
// with CUDA.
#pragma once

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "kdt/kernels/backend.h"

namespace kdt::kernels {

struct CudaBackendOptions {
  int device = 0;
  // Scratch memory of the ops, taken once: steps of 512 rows of a K2-sized rank fit the default.
  size_t workspace_bytes = size_t{512} << 20;
};

// Devices this process sees.
int CudaDevices();

// NOT_FOUND when there is no such device, FAILED_PRECONDITION when it is not one this build has code for.
absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const CudaBackendOptions& options);

}  // namespace kdt::kernels
