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

// activation[pair][j] = silu(gate_j . x) * (up_j . x) for inner columns [begin, end) of one expert, in
// natural order.
void MoeInner(const Int4Experts& w, int64_t expert, const MoePairs& pairs, int64_t begin, int64_t end,
              float* inner, float* gate, float* up) {
  const DF d;
  const int64_t words = w.hidden / 8, groups = w.hidden / 32;
  const int64_t first = pairs.begin[expert], count = pairs.begin[expert + 1] - first;
  for (int64_t j = begin; j < end; ++j) {
    const int64_t gate_row = expert * 2 * w.inner + j, up_row = gate_row + w.inner;
    Int4DotRows(pairs.x + first, count, w.gate_up + gate_row * words, w.gate_up_scale + gate_row * groups,
                w.hidden, gate);
    Int4DotRows(pairs.x + first, count, w.gate_up + up_row * words, w.gate_up_scale + up_row * groups,
                w.hidden, up);
    Transform(gate, gate, count, [d](VF v) HWY_ATTR { return Silu(d, v); });
    for (int64_t i = 0; i < count; ++i) inner[(first + i) * w.inner + j] = gate[i] * up[i];
  }
}

// out[row] += weight * (W_down activation) for hidden columns [begin, end), experts rising.
void MoeDown(const MoeArgs& args, const MoePairs& pairs, int64_t begin, int64_t end, float* dots) {
  const Int4Experts& w = args.weights;
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
    for (int64_t o = begin; o < end; ++o) {
      const int64_t row = expert * w.hidden + o;
      Int4DotRows(pairs.activation + first, count, w.down + row * words, w.down_scale + row * groups, w.inner,
                  dots);
      for (int64_t i = 0; i < count; ++i) {
        args.out.f32()[pairs.row[first + i] * args.out.stride + o] += pairs.weight[first + i] * dots[i];
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
HWY_EXPORT(MoeDown);
HWY_EXPORT(MoePack);
HWY_EXPORT(MoePackedSize);

void Moe(Context& context, const MoeArgs& args) {
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
  // Packed input rows, inner rows in natural order, then packed inner rows.
  float* const packed_x = context.scratch[3].Get<float>(rows * x_size + max_pairs * inner_size);
  float* const packed_inner = packed_x + rows * x_size;
  float* const inner = context.scratch[4].Get<float>(max_pairs * w.inner);
  for (int64_t r = 0; r < rows; ++r) pack(args.x.f32() + r * args.x.stride, w.hidden, packed_x + r * x_size);
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
  float* const dots = context.scratch[5].Get<float>(2 * threads * (max_pairs + 1));
  const int64_t cuts = std::min<int64_t>(w.inner, threads == 1 ? 1 : 2 * threads);
  const auto inner_range = HWY_DYNAMIC_DISPATCH(MoeInner);
  const auto down_range = HWY_DYNAMIC_DISPATCH(MoeDown);
  context.pool.Run(w.experts * cuts, [&](int task, int thread) {
    const int64_t expert = task / cuts, cut = task % cuts;
    if (begin[expert + 1] == begin[expert]) return;
    float* const gate = dots + 2 * thread * (max_pairs + 1);
    inner_range(w, expert, pairs, w.inner * cut / cuts, w.inner * (cut + 1) / cuts, inner, gate,
                gate + max_pairs + 1);
  });
  for (int64_t i = 0; i < held; ++i) pack(inner + i * w.inner, w.inner, packed_inner + i * inner_size);
  const int64_t down_cuts = threads == 1 ? 1 : 4 * threads;
  context.pool.Run(down_cuts, [&](int task, int thread) {
    down_range(args, pairs, w.hidden * task / down_cuts, w.hidden * (task + 1) / down_cuts,
               dots + 2 * thread * (max_pairs + 1));
  });
}

}  // namespace kdt::kernels::cpu
#endif  // HWY_ONCE
