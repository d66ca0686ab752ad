#include "kdt/kernels/rope.h"

#include <cmath>

#include "kernels/cpu/ops.h"

namespace kdt::kernels::cpu {

void Rope(Context& context, const RopeArgs& args) {
  KDT_CHECK(args.x.dtype == DType::kF32 && args.dim % 2 == 0);
  KDT_CHECK(args.heads == 0 || (args.heads - 1) * args.head_stride + args.offset + args.dim <= args.x.cols);
  const int64_t half = args.dim / 2;
  // cos and sin of each row, once for all its heads.
  float* const table = context.scratch[0].Get<float>(args.x.rows * args.dim);
  const bool interleaved = args.layout == RopeLayout::kInterleaved;
  const int64_t step = interleaved ? 2 : 1;        // from one pair to the next
  const int64_t partner = interleaved ? 1 : half;  // from a pair's first value to its second
  ParallelRanges(context, args.x.rows, 1, args.dim * (args.heads + 16), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* const cos = table + r * args.dim;
      float* const sin = cos + half;
      const float position = static_cast<float>(args.positions[r]);
      for (int64_t i = 0; i < half; ++i) {
        const float angle = position * args.inv_freq[i];
        cos[i] = std::cos(angle) * args.attention_factor;
        sin[i] = std::sin(angle) * args.attention_factor;
      }
      for (int64_t head = 0; head < args.heads; ++head) {
        float* const x = args.x.f32() + r * args.x.stride + head * args.head_stride + args.offset;
        for (int64_t i = 0; i < half; ++i) {
          float& first = x[i * step];
          float& second = x[i * step + partner];
          const float a = first, b = second;
          first = a * cos[i] - b * sin[i];
          second = b * cos[i] + a * sin[i];
        }
      }
    }
  });
}

}  // namespace kdt::kernels::cpu
