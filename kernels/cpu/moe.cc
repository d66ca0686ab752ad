// Routed experts with INT4 weights. Rows are grouped by expert; an expert's weights are read once for all its
// rows.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/moe.cc"
#include <algorithm>

#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/int4-inl.h"
#include "kernels/cpu/moe_pairs.h"
#include "kernels/cpu/ops.h"

HWY_BEFORE_NAMESPACE();
namespace kdt::kernels::cpu {
namespace HWY_NAMESPACE {

inline constexpr int64_t kPrefetchRows = 64;

// The next expert that has rows, or `expert` itself.
int64_t NextExpert(const Int4Experts& w, const MoePairs& pairs, int64_t expert) {
  for (int64_t e = expert + 1; e < w.experts; ++e) {
    if (pairs.begin[e + 1] != pairs.begin[e]) return e;
  }
  return expert;
}

// Where to fetch weights while `row` of one expert's `rows` is at work: some rows further on, in the next
// expert's rows behind the last.
HWY_INLINE const uint32_t* Ahead(const uint32_t* w, int64_t words, int64_t rows, int64_t expert, int64_t next,
                                 int64_t row) {
  const int64_t target = row + kPrefetchRows;
  if (target + static_cast<int64_t>(kInt4Outs) <= rows) return w + (expert * rows + target) * words;
  if (next != expert && target >= rows) return w + (next * rows + (target - rows) % rows) * words;
  return w + (expert * rows + row) * words;
}

// inner[pair][0 .. inner) = gate . x and inner[pair][inner .. 2 inner) = up . x, for weight rows [begin, end)
// of the 2 * inner of one expert.
void MoeInner(const Int4Experts& w, int64_t expert, const MoePairs& pairs, int64_t begin, int64_t end,
              float* inner) {
  const int64_t words = w.hidden / 8, groups = w.hidden / 32;
  const int64_t first = pairs.begin[expert], count = pairs.begin[expert + 1] - first;
  const int64_t next = NextExpert(w, pairs, expert);
  for (int64_t j = begin; j < end; j += kInt4Outs) {
    const int64_t row = expert * 2 * w.inner + j;
    Int4Dots(pairs.x + first, count, w.gate_up + row * words, w.gate_up_scale + row * groups, w.hidden,
             inner + first * 2 * w.inner + j, 2 * w.inner,
             Ahead(w.gate_up, words, 2 * w.inner, expert, next, j));
  }
}

// packed = silu(gate) * up of one pair, ready for MoeDown. The product takes the gate's place.
void MoeActivate(float* inner, size_t count, float* packed) {
  const DF d;
  const float* up = inner + count;
  for (size_t i = 0; i < count; i += kLanes) {
    hn::StoreU(hn::Mul(Silu(d, hn::LoadU(d, inner + i)), hn::LoadU(d, up + i)), d, inner + i);
  }
  PackInt4Row(inner, count, packed);
}

// out[row] += weight * (W_down activation) for hidden columns [begin, end), experts rising.
void MoeDown(const MoeArgs& args, const MoePairs& pairs, int64_t begin, int64_t end, float* dots) {
  const Int4Experts& w = args.weights;
  const D4 d4;
  const int64_t words = w.inner / 8, groups = w.inner / 32;
  if (!args.accumulate) {
    for (int64_t r = 0; r < args.out.rows; ++r) {
      std::fill(args.out.f32() + r * args.out.stride + begin, args.out.f32() + r * args.out.stride + end,
                0.0f);
    }
  }
  for (int64_t expert = 0; expert < w.experts; ++expert) {
    const int64_t first = pairs.begin[expert], count = pairs.begin[expert + 1] - first;
    if (count == 0) continue;
    const int64_t next = NextExpert(w, pairs, expert);
    for (int64_t o = begin; o < end; o += kInt4Outs) {
      const int64_t row = expert * w.hidden + o;
      Int4Dots(pairs.activation + first, count, w.down + row * words, w.down_scale + row * groups, w.inner,
               dots, kInt4Outs, Ahead(w.down, words, w.hidden, expert, next, o));
      for (int64_t i = 0; i < count; ++i) {
        const auto weight = hn::Set(d4, pairs.weight[first + i]);
        float* out = args.out.f32() + pairs.row[first + i] * args.out.stride + o;
        for (size_t c = 0; c < kInt4Outs; c += 4) {
          const auto dot = hn::LoadU(d4, dots + i * kInt4Outs + c);
          hn::StoreU(hn::MulAdd(weight, dot, hn::LoadU(d4, out + c)), d4, out + c);
        }
      }
    }
  }
}

void MoePack(const float* x, size_t inputs, float* packed) { PackInt4Row(x, inputs, packed); }
size_t MoePackedSize(size_t inputs) { return PackedInt4Size(inputs); }

}  // namespace HWY_NAMESPACE
}  // namespace kdt::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kdt::kernels::cpu {

HWY_EXPORT(MoeInner);
HWY_EXPORT(MoeActivate);
HWY_EXPORT(MoeDown);
HWY_EXPORT(MoePack);
HWY_EXPORT(MoePackedSize);

namespace {

void MoeChosen(Context& context, const MoeArgs& args) {
  const Int4Experts& w = args.weights;
  const int64_t rows = args.x.rows, top_k = args.top_k, max_pairs = rows * top_k;
  KDT_CHECK(args.x.dtype == DType::kF32 && args.out.dtype == DType::kF32 && args.out.rows == rows);
  KDT_CHECK(args.x.cols == w.hidden && args.out.cols == w.hidden);
  KDT_CHECK(w.hidden % kInt4Group == 0 && w.inner % kInt4Group == 0);
  const auto pack = HWY_DYNAMIC_DISPATCH(MoePack);
  const int64_t x_size = HWY_DYNAMIC_DISPATCH(MoePackedSize)(w.hidden);
  const int64_t inner_size = HWY_DYNAMIC_DISPATCH(MoePackedSize)(w.inner);

  // Counting sort of the pairs by expert.
  int32_t* const begin = context.scratch[0].Get<int32_t>(w.experts + 2 + max_pairs);
  int32_t* const pair_row = begin + w.experts + 2;
  std::fill(begin, begin + w.experts + 2, 0);
  const auto local = [&](int64_t pair) -> int64_t {
    const int64_t expert = args.expert_ids[pair] - w.first_expert;
    return expert >= 0 && expert < w.experts ? expert : -1;
  };
  for (int64_t pair = 0; pair < max_pairs; ++pair) {
    if (const int64_t expert = local(pair); expert >= 0) ++begin[expert + 2];
  }
  for (int64_t e = 2; e <= w.experts + 1; ++e) begin[e] += begin[e - 1];
  float* const weight = context.scratch[1].Get<float>(max_pairs);
  const float** const x = context.scratch[2].Get<const float*>(2 * max_pairs);
  const float** const activation = x + max_pairs;
  float* const packed_x = context.scratch[3].Get<float>(rows * x_size + max_pairs * inner_size);
  float* const packed_inner = packed_x + rows * x_size;
  float* const inner = context.scratch[4].Get<float>(max_pairs * 2 * w.inner);  // gate, up of each pair
  ParallelRanges(context, rows, 1, w.hidden, [&](int64_t row, int64_t end) {
    for (; row < end; ++row) pack(args.x.f32() + row * args.x.stride, w.hidden, packed_x + row * x_size);
  });
  for (int64_t pair = 0; pair < max_pairs; ++pair) {
    const int64_t expert = local(pair);
    if (expert < 0) continue;
    const int32_t at = begin[expert + 1]++;
    const int64_t row = pair / top_k;
    pair_row[at] = static_cast<int32_t>(row);
    weight[at] = args.expert_weights[pair];
    x[at] = packed_x + row * x_size;
    activation[at] = packed_inner + at * inner_size;
  }
  const MoePairs pairs{begin, pair_row, weight, x, activation};
  const int64_t held = begin[w.experts];

  const int threads = context.pool.threads();
  const auto inner_range = HWY_DYNAMIC_DISPATCH(MoeInner);
  const auto activate = HWY_DYNAMIC_DISPATCH(MoeActivate);
  const auto down_range = HWY_DYNAMIC_DISPATCH(MoeDown);
  // Ranges of whole groups of weight rows, one task for each expert and range.
  const int64_t inner_groups = 2 * w.inner / kInt4Group,
                cuts = threads == 1 ? 1 : std::min(inner_groups, 2L * threads);
  context.pool.Run(w.experts * cuts, [&](int task, int) {
    const int64_t expert = task / cuts, cut = task % cuts;
    if (begin[expert + 1] == begin[expert]) return;
    inner_range(w, expert, pairs, inner_groups * cut / cuts * kInt4Group,
                inner_groups * (cut + 1) / cuts * kInt4Group, inner);
  });
  ParallelRanges(context, held, 1, 8 * w.inner, [&](int64_t pair, int64_t end) {
    for (; pair < end; ++pair)
      activate(inner + pair * 2 * w.inner, w.inner, packed_inner + pair * inner_size);
  });
  const int64_t dots_size = 8 * max_pairs;
  float* const dots = context.scratch[5].Get<float>(threads * dots_size);
  const int64_t out_groups = w.hidden / kInt4Group,
                out_cuts = threads == 1 ? 1 : std::min(out_groups, 4L * threads);
  context.pool.Run(out_cuts, [&](int task, int thread) {
    down_range(args, pairs, out_groups * task / out_cuts * kInt4Group,
               out_groups * (task + 1) / out_cuts * kInt4Group, dots + thread * dots_size);
  });
}

}  // namespace

void Moe(Context& context, const MoeArgs& args) {
  MoeArgs chosen = args;
  if (args.choice.scores.rows > 0) {
    KDT_CHECK(args.choice.scores.rows == args.x.rows);
    ChooseExperts(context, args.choice, args.top_k);
    chosen.expert_ids = args.choice.expert_ids, chosen.expert_weights = args.choice.weights;
  }
  if (args.shared_down.rows > 0) {
    KDT_CHECK(!args.accumulate);
    Gemm(context, {args.shared_inner, args.shared_down, args.out});
    chosen.accumulate = true;
  }
  MoeChosen(context, chosen);
}

}  // namespace kdt::kernels::cpu
#endif  // HWY_ONCE
