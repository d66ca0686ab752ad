#include "worker/backend_factory.h"

#include "absl/strings/str_cat.h"

namespace kdt {

absl::StatusOr<std::unique_ptr<kernels::Backend>> MakeBackend(const std::string& name, int threads) {
  if (name == "cpu") return kernels::MakeCpuBackend(threads);
  return absl::InvalidArgumentError(absl::StrCat("--backend: \"", name, "\" is not one of: cpu"));
}

}  // namespace kdt
