#include "kdt/kernels/draft_prepare.h"

#include "kernels/cpu/ops.h"

namespace kdt::kernels::cpu {
namespace {

void NormAndRotate(Context& context, const DraftPrepareArgs& args, const Tensor& x, int64_t heads,
                   const uint16_t* weight) {
  for (int64_t h = 0; h < heads; ++h) {
    const Tensor head = x.Columns(h * args.dim, args.dim);
    RmsNorm(context, {head, {}, weight, args.eps, head});
  }
  Rope(context, {x, heads, args.dim, 0, args.dim, args.positions, args.inv_freq, args.attention_factor,
                 RopeLayout::kHalfSplit});
}

}  // namespace

void DraftPrepare(Context& context, const DraftPrepareArgs& args) {
  const int64_t width = args.kv_heads * args.dim;
  KDT_CHECK(args.kv.cols == args.layers * 2 * width);
  if (args.q.data != nullptr) {
    KDT_CHECK(args.q.cols == args.heads * args.dim && args.q.rows == args.kv.rows);
    NormAndRotate(context, args, args.q, args.heads, args.q_norm);
  }
  for (int64_t l = 0; l < args.layers; ++l) {
    const Tensor keys = args.kv.Columns(l * 2 * width, width);
    NormAndRotate(context, args, keys, args.kv_heads, args.k_norms[l]);
    if (args.slots == nullptr) continue;
    Tensor pool = args.pool;
    pool.data = static_cast<char*>(pool.data) + l * args.pool_layer_stride * DTypeSize(pool.dtype);
    KvWrite(context, {args.kv.Columns(l * 2 * width, 2 * width), args.slots, pool});
  }
}

}  // namespace kdt::kernels::cpu
