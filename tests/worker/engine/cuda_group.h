// Engine groups on a GPU. The tests pass, saying so, where there is none.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "kdt/kernels/cuda_backend.h"
#include "tests/support/catch.h"
#include "tests/worker/support/engine_group.h"

namespace kdt::testing {

inline absl::StatusOr<std::unique_ptr<kernels::Backend>> MakeGpu() {
  kernels::CudaBackendOptions options;
  options.workspace_bytes = size_t{256} << 20;  // tiny models, several ranks
  return kernels::MakeCudaBackend(options);
}

inline bool HaveGpu() {
  static const bool have = MakeGpu().ok();
  return have;
}

#define KDT_NEED_GPU()                               \
  do {                                               \
    if (!::kdt::testing::HaveGpu()) {                \
      WARN("no GPU of this build's kinds: skipped"); \
      return;                                        \
    }                                                \
  } while (false)

// GoldenOptions with what CUDA wants.
inline EngineOptions CudaOptions(bool with_drafter) {
  EngineOptions options = GoldenOptions(with_drafter);
  options.kv_dtype = kernels::DType::kBF16;
  return options;
}

}  // namespace kdt::testing
