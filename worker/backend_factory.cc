#include "worker/backend_factory.h"

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

absl::StatusOr<std::unique_ptr<kernels::Backend>> MakeBackend(const std::string& name, int threads) {
  if (name == "cpu") return kernels::MakeCpuBackend(threads);
#ifdef KDT_HAVE_CUDA
  if (name == "cuda") return kernels::MakeCudaBackend({});
#endif
  return absl::InvalidArgumentError(absl::StrCat("--backend: \"", name, "\" is not one of: ", kBackends));
}

}  // namespace kdt
