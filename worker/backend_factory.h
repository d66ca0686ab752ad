// Backends by the name that --backend takes.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kdt/kernels/backend.h"

namespace kdt {

// `threads` is for the CPU backend. INVALID_ARGUMENT names --backend and lists what this build has.
absl::StatusOr<std::unique_ptr<kernels::Backend>> MakeBackend(const std::string& name, int threads);

}  // namespace kdt
