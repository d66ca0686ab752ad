#include "kdt/kernels/kv_write.h"

#include <cstring>

#include "common/bf16.h"
#include "kernels/cpu/ops.h"

namespace kdt::kernels::cpu {

void KvWrite(Context& context, const KvWriteArgs& args) {
  KDT_CHECK(args.x.dtype == DType::kF32 && args.x.cols == args.pool.cols);
  const int64_t width = args.x.cols;
  ParallelRanges(context, args.x.rows, 1, width, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t slot = args.slots[r];
      if (slot < 0) continue;
      KDT_CHECK(slot < args.pool.rows);
      const float* from = args.x.f32() + r * args.x.stride;
      if (args.pool.dtype == DType::kF32) {
        std::memcpy(args.pool.f32() + slot * args.pool.stride, from, width * sizeof(float));
      } else {
        uint16_t* to = args.pool.bf16() + slot * args.pool.stride;
        for (int64_t i = 0; i < width; ++i) to[i] = FloatToBf16(from[i]);
      }
    }
  });
}

}  // namespace kdt::kernels::cpu
