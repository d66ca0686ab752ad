// Tree and chain attention over the latent pool.
//
// The rows of a sequence that walk the same keys walk them together, so a block of keys is read once for all
// of them:
//   chain: every row's keys are a prefix of the last row's, rows only stop earlier;
//   tree:  whole blocks of the committed prefix are common, what follows (the rest of the prefix and the
//   row's own
//          ancestors) is each row's own.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/verify_attention.cc"
#include <algorithm>
#include <bit>

#include "common/bf16.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/attention-inl.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu/verify_task.h"

HWY_BEFORE_NAMESPACE();
namespace kdt::kernels::cpu {
namespace HWY_NAMESPACE {

// Keys of `count` slots; bf16 rows are widened into `widened`.
void GatherKeys(const VerifyAttentionArgs& args, const int32_t* slots, size_t count, float* widened,
                KeyBlock& block) {
  const DF d;
  const size_t width = args.latent + args.rope;
  for (size_t k = 0; k < count; ++k) {
    const int64_t slot = slots[k];
    KDT_CHECK(slot >= 0 && slot < args.pool.rows);
    if (args.pool.dtype == DType::kF32) {
      block.keys[k] = args.pool.f32() + slot * args.pool.stride;
    } else {
      const uint16_t* from = args.pool.bf16() + slot * args.pool.stride;
      float* to = widened + k * width;
      size_t i = 0;
      for (; i + kLanes <= width; i += kLanes) hn::StoreU(LoadBf16(d, from + i), d, to + i);
      for (; i < width; ++i) to[i] = Bf16ToFloat(from[i]);
      block.keys[k] = to;
    }
    block.values[k] = block.keys[k];
  }
}

void VerifyRows(const VerifyAttentionArgs& args, const VerifyTask& task, float* widened) {
  const int64_t width = args.latent + args.rope, context_length = args.context_length[task.sequence];
  const int64_t first_row = args.row_begin[task.sequence];
  const int32_t* table = args.slot_table + task.sequence * args.table_stride;
  const bool causal = args.causal[task.sequence] != 0;
  Query queries[kTaskQueries];
  const auto row_queries = [&](int64_t i) { return queries + i * task.heads; };
  for (int64_t i = 0; i < task.rows; ++i) {
    for (int64_t h = 0; h < task.heads; ++h) {
      const int64_t head = task.head + h;
      StartQuery(row_queries(i)[h], args.q.f32() + (task.row + i) * args.q.stride + head * width,
                 args.out.f32() + (task.row + i) * args.out.stride + head * args.latent);
    }
  }
  KeyBlock block;
  constexpr int64_t kBlock = kKeyBlock;
  const auto attend = [&](Query* some, int64_t count, int64_t keys) {
    AttendBlock(some, count, block, keys, width, args.latent, args.scale);
  };

  if (causal) {
    const int64_t before = context_length + task.row - first_row;  // keys in front of the task's first row
    const int64_t total = before + task.rows;
    for (int64_t begin = 0; begin < total; begin += kBlock) {
      GatherKeys(args, table + begin, std::min(kBlock, total - begin), widened, block);
      // Rows that see the whole block share tiles; the others stop at their own key.
      int64_t i = std::max<int64_t>(0, begin - before);
      const int64_t whole = std::clamp<int64_t>(begin + kBlock - before - 1, i, task.rows);
      for (; i < whole; ++i) attend(row_queries(i), task.heads, before + i + 1 - begin);
      if (i < task.rows) attend(row_queries(i), (task.rows - i) * task.heads, kBlock);
    }
  } else {
    const int64_t common = context_length / kBlock * kBlock;
    for (int64_t begin = 0; begin < common; begin += kBlock) {
      GatherKeys(args, table + begin, kBlock, widened, block);
      attend(queries, task.rows * task.heads, kBlock);
    }
    for (int64_t i = 0; i < task.rows; ++i) {
      int32_t slots[kBlock];
      int64_t count = 0;
      const auto flush = [&] {
        GatherKeys(args, slots, count, widened, block);
        attend(row_queries(i), task.heads, count);
        count = 0;
      };
      for (int64_t p = common; p < context_length; ++p) slots[count++] = table[p];
      const uint64_t* bits = args.ancestor_bits + (task.row + i) * kAncestorWords;
      for (int word = 0; word < kAncestorWords; ++word) {
        for (uint64_t left = bits[word]; left != 0; left &= left - 1) {
          if (count == kBlock) flush();
          slots[count++] = table[context_length + word * 64 + std::countr_zero(left)];
        }
      }
      if (count > 0) flush();
    }
  }
  for (int64_t i = 0; i < task.rows * task.heads; ++i) {
    if (queries[i].sum == 0.0f) std::fill(queries[i].out, queries[i].out + args.latent, 0.0f);
    FinishQuery(queries[i], args.latent);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kdt::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kdt::kernels::cpu {

HWY_EXPORT(VerifyRows);

void VerifyAttention(Context& context, const VerifyAttentionArgs& args) {
  KDT_CHECK(args.q.dtype == DType::kF32 && args.out.dtype == DType::kF32);
  KDT_CHECK(args.q.cols == args.heads * (args.latent + args.rope) &&
            args.out.cols == args.heads * args.latent);
  KDT_CHECK(args.pool.cols == args.latent + args.rope);
  if (args.sequences == 0 || args.heads == 0) return;
  const int64_t rows = args.row_begin[args.sequences] - args.row_begin[0];
  const int64_t threads = context.pool.threads();
  // Heads are split only where there are too few rows to keep the threads busy.
  const int64_t max_heads = std::min(args.heads, kTaskQueries);
  const int64_t head_cuts = std::max((args.heads + max_heads - 1) / max_heads,
                                     rows < threads ? std::min(args.heads, threads) : int64_t{1});
  const int64_t heads = (args.heads + head_cuts - 1) / head_cuts;
  const int64_t rows_each = std::clamp<int64_t>((rows + threads - 1) / threads, 1, kTaskQueries / heads);
  int64_t count = 0;
  VerifyTask* const tasks = context.scratch[0].Get<VerifyTask>((rows + args.sequences) * head_cuts);
  for (int64_t s = 0; s < args.sequences; ++s) {
    KDT_CHECK(args.causal[s] != 0 || args.row_begin[s + 1] - args.row_begin[s] <= kMaxTreeRows);
    for (int64_t row = args.row_begin[s]; row < args.row_begin[s + 1]; row += rows_each) {
      for (int64_t head = 0; head < args.heads; head += heads) {
        tasks[count++] = {s, row, std::min(rows_each, args.row_begin[s + 1] - row), head,
                          std::min(heads, args.heads - head)};
      }
    }
  }
  const int64_t widened_size =
      args.pool.dtype == DType::kBF16 ? static_cast<int64_t>(64) * (args.latent + args.rope) : int64_t{0};
  float* const widened = context.scratch[1].Get<float>(threads * widened_size);
  const auto run = HWY_DYNAMIC_DISPATCH(VerifyRows);
  context.pool.Run(count,
                   [&](int task, int thread) { run(args, tasks[task], widened + thread * widened_size); });
}

}  // namespace kdt::kernels::cpu
#endif  // HWY_ONCE
