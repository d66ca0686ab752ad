#include "kdt/kernels/compare.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/bf16.h"
#include "kernels/cpu/ops.h"

namespace kdt::kernels::cpu {
namespace {

float At(const Tensor& t, int64_t row, int64_t col) {
  const int64_t i = row * t.stride + col;
  return t.dtype == DType::kF32 ? t.f32()[i] : Bf16ToFloat(t.bf16()[i]);
}

// Size of a bf16 step at x, a finite number that bf16 holds.
float StepOf(float x) { return std::ldexp(1.0f, std::max(x == 0.0f ? -126 : std::ilogb(x), -126) - 7); }

}  // namespace

void Compare(Context&, const CompareArgs& args) {
  KDT_CHECK(args.value.dtype == args.reference.dtype && args.value.rows == args.reference.rows &&
            args.value.cols == args.reference.cols);
  const int64_t rows =
      args.used_rows == nullptr ? args.value.rows : std::min<int64_t>(args.value.rows, *args.used_rows);
  constexpr float kFar = std::numeric_limits<float>::infinity();
  for (int64_t row = 0; row < rows; ++row) {
    float top = 0.0f;
    for (int64_t col = 0; col < args.value.cols; ++col) {
      const float x = std::abs(Bf16ToFloat(FloatToBf16(At(args.reference, row, col))));
      if (std::isfinite(x)) top = std::max(top, x);
    }
    const float row_step = StepOf(top);
    for (int64_t col = 0; col < args.value.cols; ++col) {
      const float value = At(args.value, row, col);
      const float exact = Bf16ToFloat(FloatToBf16(At(args.reference, row, col)));
      float own = 0.0f, of_row = 0.0f;
      if (std::isfinite(value) && std::isfinite(exact)) {
        const float distance = std::abs(value - exact);
        own = distance / StepOf(exact);
        of_row = distance / row_step;
      } else if (value != exact && !(std::isnan(value) && std::isnan(exact))) {
        own = of_row = kFar;
      }
      args.stats->values += 1;
      args.stats->beyond_one += own > 1.0f ? 1 : 0;
      args.stats->beyond_one_of_row += of_row > 1.0f ? 1 : 0;
      args.stats->largest = std::max(args.stats->largest, own);
      args.stats->largest_of_row = std::max(args.stats->largest_of_row, of_row);
    }
  }
}

}  // namespace kdt::kernels::cpu
