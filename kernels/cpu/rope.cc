#include "kdt/kernels/rope.h"

#include <cmath>

#include "kernels/cpu/ops.h"
#include "kernels/cpu/rope_rows.h"

namespace kdt::kernels::cpu {

void RopeTable(int32_t position, const float* inv_freq, int64_t half, float attention_factor, float* cos,
               float* sin) {
  for (int64_t i = 0; i < half; ++i) {
    const float angle = static_cast<float>(position) * inv_freq[i];
    cos[i] = std::cos(angle) * attention_factor;
    sin[i] = std::sin(angle) * attention_factor;
  }
}

void RotatePairs(const float* from, const float* cos, const float* sin, int64_t half, RopeLayout layout,
                 float* to) {
  const bool interleaved = layout == RopeLayout::kInterleaved;
  const int64_t step = interleaved ? 2 : 1;        // from one pair to the next
  const int64_t partner = interleaved ? 1 : half;  // from a pair's first value to its second
  for (int64_t i = 0; i < half; ++i) {
    const float a = from[i * step], b = from[i * step + partner];
    to[i * step] = a * cos[i] - b * sin[i];
    to[i * step + partner] = b * cos[i] + a * sin[i];
  }
}

void Rope(Context& context, const RopeArgs& args) {
  KDT_CHECK(args.x.dtype == DType::kF32 && args.dim % 2 == 0);
  KDT_CHECK(args.heads == 0 || (args.heads - 1) * args.head_stride + args.offset + args.dim <= args.x.cols);
  const int64_t half = args.dim / 2;
  // cos and sin of each row, once for all its heads.
  float* const table = context.scratch[0].Get<float>(args.x.rows * args.dim);
  ParallelRanges(context, args.x.rows, 1, args.dim * (args.heads + 16), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* const cos = table + r * args.dim;
      float* const sin = cos + half;
      RopeTable(args.positions[r], args.inv_freq, half, args.attention_factor, cos, sin);
      for (int64_t head = 0; head < args.heads; ++head) {
        float* const x = args.x.f32() + r * args.x.stride + head * args.head_stride + args.offset;
        RotatePairs(x, cos, sin, half, args.layout, x);
      }
    }
  });
}

}  // namespace kdt::kernels::cpu
