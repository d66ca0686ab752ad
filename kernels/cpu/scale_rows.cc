#include "kdt/kernels/logits.h"
#include "kernels/cpu/ops.h"

namespace kdt::kernels::cpu {

void ScaleRows(Context& context, const ScaleRowsArgs& args) {
  KDT_CHECK(args.x.dtype == DType::kF32);
  ParallelRanges(context, args.x.rows, 1, args.x.cols, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float factor = args.factor[r];
      if (factor == 1) continue;
      float* const row = args.x.f32() + r * args.x.stride;
      for (int64_t i = 0; i < args.x.cols; ++i) row[i] *= factor;
    }
  });
}

}  // namespace kdt::kernels::cpu
