#include "worker/backend_factory.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#ifdef KDT_HAVE_CUDA
#include "kdt/kernels/cuda_backend.h"
#endif

namespace kdt {
namespace {

#ifdef KDT_HAVE_CUDA
constexpr char kBackends[] = "cpu, cuda";
#else
constexpr char kBackends[] = "cpu";
#endif

}  // namespace

absl::StatusOr<std::unique_ptr<kernels::Backend>> MakeBackend(const std::string& name,
                                                              const BackendOptions& options) {
  if (name == "cpu") return kernels::MakeCpuBackend(options.threads);
#ifdef KDT_HAVE_CUDA
  if (name == "cuda") {
    const int devices = std::max(kernels::CudaDevices(), 1);
    return kernels::MakeCudaBackend({options.device < 0 ? options.rank % devices : options.device});
  }
#endif
  return absl::InvalidArgumentError(absl::StrCat("--backend: \"", name, "\" is not one of: ", kBackends));
}

}  // namespace kdt
