#include "kdt/kernels/kv_move.h"

#include <cstring>

#include "kernels/cpu/ops.h"

namespace kdt::kernels::cpu {

void KvMove(Context& context, const KvMoveArgs& args) {
  const int64_t size = DTypeSize(args.pool.dtype);
  char* const data = static_cast<char*>(args.pool.data);
  for (int64_t i = 0; i < args.count; ++i) {
    KDT_CHECK(args.from[i] >= 0 && args.from[i] < args.pool.rows && args.to[i] >= 0 &&
              args.to[i] < args.pool.rows);
  }
  // Rows of one layer move in order, layers are independent.
  ParallelRanges(context, args.layers, 1, args.count * args.pool.cols * size / 4,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t layer = begin; layer < end; ++layer) {
                     char* const pool = data + layer * args.layer_stride * size;
                     for (int64_t i = 0; i < args.count; ++i) {
                       if (args.from[i] == args.to[i]) continue;
                       std::memcpy(pool + args.to[i] * args.pool.stride * size,
                                   pool + args.from[i] * args.pool.stride * size, args.pool.cols * size);
                     }
                   }
                 });
}

}  // namespace kdt::kernels::cpu
