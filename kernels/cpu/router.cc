// Sigmoid routing with a correction bias.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/router.cc"
#include <algorithm>
#include <limits>

#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/dot-inl.h"
#include "kernels/cpu/ops.h"

HWY_BEFORE_NAMESPACE();
namespace kdt::kernels::cpu {
namespace HWY_NAMESPACE {

float DotF32(const float* x, const float* w, size_t inputs) {
  const DF d;
  VF sum = hn::Zero(d);
  size_t i = 0;
  for (; i + kLanes <= inputs; i += kLanes) sum = hn::MulAdd(hn::LoadU(d, x + i), hn::LoadU(d, w + i), sum);
  if (i < inputs) sum = hn::MulAdd(LoadTail(d, x + i, inputs - i), LoadTail(d, w + i, inputs - i), sum);
  return SumLanes(d, sum);
}

void RouterScores(const RouterArgs& args, int64_t row, float* packed, float* scores) {
  const int64_t inputs = args.x.cols, experts = args.w.rows;
  const float* x = args.x.f32() + row * args.x.stride;
  if (args.w.dtype == DType::kBF16) {
    PackRow(x, inputs, packed);
    DotAll(packed, 0, 1, args.w.bf16(), args.w.stride, inputs, experts, scores, 0, false);
  } else {
    for (int64_t e = 0; e < experts; ++e) scores[e] = DotF32(x, args.w.f32() + e * args.w.stride, inputs);
  }
}

void RouterSigmoid(const float* scores, int64_t experts, float* out) {
  const DF d;
  Transform(scores, out, experts, [d](VF v) HWY_ATTR { return Sigmoid(d, v); });
}

size_t RouterScratch(size_t inputs) { return PackedSize(inputs); }

}  // namespace HWY_NAMESPACE
}  // namespace kdt::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kdt::kernels::cpu {

HWY_EXPORT(RouterScores);
HWY_EXPORT(RouterScratch);
HWY_EXPORT(RouterSigmoid);

namespace {

// The top_k experts of row `row` by score + bias, ties to the lower index, then listed by rising index.
// `room` has two values for each of the experts.
void Choose(const MoeChoice& args, int64_t top_k, int64_t row, float* room) {
  const int64_t experts = args.scores.cols;
  int32_t* const ids = args.expert_ids + row * top_k;
  float *const weights = args.weights + row * top_k, *const scores = room, *const biased = room + experts;
  if (args.row_count != nullptr && row >= *args.row_count) {
    std::fill_n(ids, top_k, -1);
    std::fill_n(weights, top_k, 0.0f);
    return;
  }
  HWY_DYNAMIC_DISPATCH(RouterSigmoid)(args.scores.f32() + row * args.scores.stride, experts, scores);
  for (int64_t e = 0; e < experts; ++e) biased[e] = scores[e] + args.bias[e];
  for (int64_t k = 0; k < top_k; ++k) {
    int64_t best = -1;
    for (int64_t e = 0; e < experts; ++e) {
      if (std::find(ids, ids + k, e) != ids + k) continue;
      // A NaN (from a broken row) loses against everything, but some expert must be named.
      if (best < 0 || biased[e] > biased[best] || (biased[best] != biased[best] && biased[e] == biased[e]))
        best = e;
    }
    ids[k] = static_cast<int32_t>(best);
  }
  std::sort(ids, ids + top_k);
  float sum = 0.0f;
  for (int64_t k = 0; k < top_k; ++k) sum += weights[k] = scores[ids[k]];
  const float factor = args.normalize ? args.scale / (sum + 1e-20f) : args.scale;
  for (int64_t k = 0; k < top_k; ++k) weights[k] *= factor;
}

}  // namespace

void ChooseExperts(Context& context, const MoeChoice& args, int64_t top_k) {
  const int64_t experts = args.scores.cols;
  KDT_CHECK(args.scores.dtype == DType::kF32 && top_k >= 1 && top_k <= kMaxExpertsPerToken &&
            top_k <= experts);
  float* const room = context.scratch[0].Get<float>(args.scores.rows * 2 * experts);
  ParallelRanges(context, args.scores.rows, 1, 16 * experts, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) Choose(args, top_k, r, room + r * 2 * experts);
  });
}

void Router(Context& context, const RouterArgs& args) {
  KDT_CHECK(args.x.dtype == DType::kF32 && args.w.cols == args.x.cols);
  KDT_CHECK(args.top_k >= 1 && args.top_k <= kMaxExpertsPerToken && args.top_k <= args.w.rows);
  if (args.shared_gate_up.rows > 0) {
    const Tensor gate_up = args.shared_inner.Columns(0, 2 * args.shared_down.cols);
    Gemm(context, {args.x, args.shared_gate_up, gate_up});
    GemmArgs down{gate_up, args.shared_down, args.shared_y};
    down.gated = true;
    Gemm(context, down);
  }
  const int64_t experts = args.w.rows, inputs = args.x.cols;
  const auto score = HWY_DYNAMIC_DISPATCH(RouterScores);
  const int64_t packed_size = HWY_DYNAMIC_DISPATCH(RouterScratch)(inputs);
  float* const packed = context.scratch[0].Get<float>(args.x.rows * packed_size);
  MoeChoice choice;
  choice.scores =
      MakeTensor(context.scratch[1].Get<float>(args.x.rows * experts), DType::kF32, args.x.rows, experts);
  choice.bias = args.bias, choice.normalize = args.normalize, choice.scale = args.scale;
  choice.row_count = args.row_count;
  choice.expert_ids = args.expert_ids, choice.weights = args.weights;
  const int64_t real_rows = args.row_count == nullptr ? args.x.rows : *args.row_count;
  ParallelRanges(context, std::min(args.x.rows, real_rows), 1, experts * inputs,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t r = begin; r < end; ++r)
                     score(args, r, packed + r * packed_size, choice.scores.f32() + r * experts);
                 });
  ChooseExperts(context, choice, args.top_k);
}

}  // namespace kdt::kernels::cpu
#endif  // HWY_ONCE
