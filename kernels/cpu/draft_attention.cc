// Grouped-query attention of draft blocks over their context and themselves.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/draft_attention.cc"
#include <algorithm>

#include "common/bf16.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/attention-inl.h"
#include "kernels/cpu/ops.h"

HWY_BEFORE_NAMESPACE();
namespace kdt::kernels::cpu {
namespace HWY_NAMESPACE {

inline constexpr int64_t kDraftQueries = 64;  // queries that share a block of keys

// All queries of one sequence and one KV head.
void DraftHead(const DraftAttentionArgs& args, int64_t sequence, int64_t kv_head, float* widened) {
  const int64_t dim = args.dim, group = args.heads / args.kv_heads, first_row = sequence * args.block;
  const int64_t window = args.window_begin[sequence];
  const int64_t context_keys = std::max<int64_t>(0, args.context_length[sequence] - window);
  const int64_t total = context_keys + args.block;
  const int32_t* table = args.slot_table + sequence * args.table_stride + window;
  const bool wide = args.pool.dtype == DType::kF32;
  const int64_t k_offset = kv_head * dim, v_offset = (args.kv_heads + kv_head) * dim;
  Query queries[kDraftQueries];
  for (int64_t begin_query = 0; begin_query < args.block * group; begin_query += kDraftQueries) {
    const int64_t count = std::min(kDraftQueries, args.block * group - begin_query);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = first_row + (begin_query + i) / group;
      const int64_t head = kv_head * group + (begin_query + i) % group;
      StartQuery(queries[i], args.q.f32() + row * args.q.stride + head * dim,
                 args.out.f32() + row * args.out.stride + head * dim);
    }
    for (int64_t begin = 0; begin < total; begin += kKeyBlock) {
      KeyBlock block;
      const int64_t keys = std::min<int64_t>(kKeyBlock, total - begin);
      for (int64_t k = 0; k < keys; ++k) {
        if (const int64_t own = begin + k - context_keys; own >= 0) {
          block.keys[k] = args.block_k.f32() + (first_row + own) * args.block_k.stride + k_offset;
          block.values[k] = args.block_v.f32() + (first_row + own) * args.block_v.stride + k_offset;
          continue;
        }
        const int64_t slot = table[begin + k];
        KDT_CHECK(slot >= 0 && slot < args.pool.rows);
        if (wide) {
          const float* row = args.pool.f32() + slot * args.pool.stride;
          block.keys[k] = row + k_offset;
          block.values[k] = row + v_offset;
        } else {
          const uint16_t* row = args.pool.bf16() + slot * args.pool.stride;
          float* to = widened + k * 2 * dim;
          for (int64_t i = 0; i < dim; ++i) to[i] = Bf16ToFloat(row[k_offset + i]);
          for (int64_t i = 0; i < dim; ++i) to[dim + i] = Bf16ToFloat(row[v_offset + i]);
          block.keys[k] = to;
          block.values[k] = to + dim;
        }
      }
      AttendBlock(queries, count, block, keys, dim, dim, args.scale);
    }
    for (int64_t i = 0; i < count; ++i) FinishQuery(queries[i], dim);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kdt::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kdt::kernels::cpu {

HWY_EXPORT(DraftHead);

void DraftAttention(Context& context, const DraftAttentionArgs& args) {
  KDT_CHECK(args.q.dtype == DType::kF32 && args.out.dtype == DType::kF32);
  KDT_CHECK(args.block_k.dtype == DType::kF32 && args.block_v.dtype == DType::kF32);
  KDT_CHECK(args.kv_heads >= 1 && args.heads % args.kv_heads == 0);
  KDT_CHECK(args.q.cols == args.heads * args.dim && args.out.cols == args.heads * args.dim);
  KDT_CHECK(args.pool.cols == 2 * args.kv_heads * args.dim);
  KDT_CHECK(args.q.rows >= args.sequences * args.block);
  const int64_t widened_size = args.pool.dtype == DType::kBF16 ? 64 * 2 * args.dim : 0;
  float* const widened = context.scratch[0].Get<float>(context.pool.threads() * widened_size);
  const auto run = HWY_DYNAMIC_DISPATCH(DraftHead);
  context.pool.Run(args.sequences * args.kv_heads, [&](int task, int thread) {
    run(args, task / args.kv_heads, task % args.kv_heads, widened + thread * widened_size);
  });
}

}  // namespace kdt::kernels::cpu
#endif  // HWY_ONCE
