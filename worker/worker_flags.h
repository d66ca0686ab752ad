// The flags of kdt-worker, checked.
#pragma once

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "common/address.h"
#include "common/tls.h"
#include "worker/backend_factory.h"
#include "worker/collective/choice.h"
#include "worker/engine/engine.h"

namespace kdt {

struct WorkerOptions {
  EngineOptions engine;                    // but for kv_dtype
  std::optional<kernels::DType> kv_dtype;  // unset: that of the backend's activations
  std::string backend;
  BackendOptions backend_options;
  CollectiveKind collective;
  Address listen;
  std::optional<TlsMaterial> tls;
  Address metrics;
  bool has_metrics = false;
};

// INVALID_ARGUMENT names the flag.
absl::StatusOr<WorkerOptions> WorkerOptionsFromFlags();

}  // namespace kdt
