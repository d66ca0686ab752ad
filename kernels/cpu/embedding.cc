#include "kdt/kernels/embedding.h"

#include <cstring>

#include "common/bf16.h"
#include "kernels/cpu/ops.h"

namespace kdt::kernels::cpu {

void Embedding(Context& context, const EmbeddingArgs& args) {
  KDT_CHECK(args.out.dtype == DType::kF32 && args.table.cols == args.out.cols);
  const int64_t hidden = args.out.cols;
  ParallelRanges(context, args.out.rows, 1, hidden, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* out = args.out.f32() + r * args.out.stride;
      const int64_t local = args.token_ids[r] - args.vocab_begin;
      if (local < 0 || local >= args.table.rows) {
        std::memset(out, 0, hidden * sizeof(float));
        continue;
      }
      if (args.table.dtype == DType::kF32) {
        std::memcpy(out, args.table.f32() + local * args.table.stride, hidden * sizeof(float));
        continue;
      }
      const uint16_t* row = args.table.bf16() + local * args.table.stride;
      for (int64_t i = 0; i < hidden; ++i) out[i] = Bf16ToFloat(row[i]);
    }
  });
}

}  // namespace kdt::kernels::cpu
