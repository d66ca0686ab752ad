// CUDA calls with their text and place in the error.
#pragma once

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace kdt::cuda {

inline absl::Status CallStatus(cudaError_t error, const char* call, const char* file, int line) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string text = absl::StrCat(call, ": ", cudaGetErrorName(error), " (", cudaGetErrorString(error),
                                        ") at ", file, ":", line);
  return error == cudaErrorMemoryAllocation ? absl::ResourceExhaustedError(text) : absl::InternalError(text);
}

}  // namespace kdt::cuda

#define KDT_CUDA_STATUS(call) ::kdt::cuda::CallStatus((call), #call, __FILE__, __LINE__)
#define KDT_CUDA_RETURN_IF_ERROR(call)                                               \
  do {                                                                               \
    if (absl::Status status_ = KDT_CUDA_STATUS(call); !status_.ok()) return status_; \
  } while (false)
