// Memory and copies of the CUDA backend, counted, and refused while it is sealed.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kdt/kernels/backend.h"

namespace kdt::cuda {

// Every call works on the stream that was set; contracts are kernels::Backend's.
class Memory {
 public:
  void SetStream(cudaStream_t stream) { stream_ = stream; }

  absl::StatusOr<void*> Allocate(size_t bytes);
  void Free(void* data);
  absl::StatusOr<void*> AllocateHost(size_t bytes);
  void FreeHost(void* data);
  absl::Status Upload(void* device, const void* host, size_t bytes);
  absl::Status Download(void* host, const void* device, size_t bytes);
  absl::Status Synchronize();

  void Seal(bool sealed) { sealed_ = sealed; }
  kernels::BackendStats& stats() { return stats_; }
  const kernels::BackendStats& stats() const { return stats_; }

 private:
  absl::Status Refused(const char* call, size_t bytes) const;

  cudaStream_t stream_ = nullptr;
  bool sealed_ = false;
  bool freed_while_sealed_ = false;
  kernels::BackendStats stats_;
};

}  // namespace kdt::cuda
