#include "worker/collective/collective.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace kdt {
namespace {

constexpr int64_t kProbeValues = 4096;

}  // namespace

absl::Status Collective::Probe() {
  std::vector<float> values(kProbeValues, static_cast<float>(rank() + 1));
  KDT_RETURN_IF_ERROR(
      AllReduceSum(kernels::MakeTensor(values.data(), kernels::DType::kF32, 1, kProbeValues)));
  const auto expected = static_cast<float>(size() * (size() + 1) / 2);
  for (const float value : values) {
    if (value != expected) {
      return absl::InternalError(
          absl::StrCat("the first reduction over ", size(), " ranks gave ", value, " instead of ", expected));
    }
  }
  return absl::OkStatus();
}

}  // namespace kdt
