// Backends by the name that --backend takes.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kdt/kernels/backend.h"

namespace kdt {

struct BackendOptions {
  int threads = 1;  // cpu
  int device = -1;  // cuda: which GPU; negative: the rank modulo the number of GPUs
  int rank = 0;
};

// INVALID_ARGUMENT names --backend and lists what this build has.
absl::StatusOr<std::unique_ptr<kernels::Backend>> MakeBackend(const std::string& name,
                                                              const BackendOptions& options);

}  // namespace kdt
