// Statistics and the best k of logit rows.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/logits.cc"
#include <algorithm>
#include <limits>

#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kdt::kernels::cpu {
namespace HWY_NAMESPACE {

// Maximum (NaN left out) and whether every logit is finite.
void LogitsMax(const float* logits, size_t count, float* max, uint8_t* bad) {
  const DF d;
  const VF limit = hn::Set(d, std::numeric_limits<float>::max());
  const VF lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  VF best = lowest;
  auto finite = hn::Le(hn::Zero(d), limit);
  const auto take = [&](VF v) HWY_ATTR {
    best = hn::Max(best, hn::IfThenElse(hn::IsNaN(v), lowest, v));
    finite = hn::And(finite, hn::Le(hn::Abs(v), limit));
  };
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) take(hn::LoadU(d, logits + i));
  if (i < count) {
    // Pads the tail with its first value, which changes neither answer.
    HWY_ALIGN float padded[kLanes];
    std::fill(padded, padded + kLanes, logits[i]);
    std::copy(logits + i, logits + count, padded);
    take(hn::Load(d, padded));
  }
  *max = MaxLane(d, best);
  *bad = hn::AllTrue(d, finite) ? 0 : 1;
}

float LogitsSumExp(const float* logits, size_t count, float max) {
  const DF d;
  const VF shift = hn::Set(d, max);
  // Four sums in turn: less rounding in long rows, and no waiting for the addition before.
  VF sums[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
  size_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    HWY_UNROLL(4)
    for (size_t j = 0; j < 4; ++j) {
      sums[j] = hn::Add(sums[j], Exp(d, hn::Sub(hn::LoadU(d, logits + i + j * kLanes), shift)));
    }
  }
  for (; i < count; i += kLanes) {
    HWY_ALIGN float padded[kLanes];
    std::fill(padded, padded + kLanes, -std::numeric_limits<float>::infinity());
    std::copy(logits + i, logits + std::min(count, i + kLanes), padded);
    sums[0] = hn::Add(sums[0], Exp(d, hn::Sub(hn::Load(d, padded), shift)));
  }
  const VF sum = hn::Add(hn::Add(sums[0], sums[1]), hn::Add(sums[2], sums[3]));
  return SumLanes(d, sum);
}

// The k best, best first, ties by rising index; NaN is left out. Returns how many were found.
size_t LogitsBest(const float* logits, size_t count, size_t k, int32_t* ids, float* values) {
  if (k == 0) return 0;
  const DF d;
  size_t found = 0;
  const auto offer = [&](size_t i) {
    const float value = logits[i];
    if (found == k ? !(value > values[k - 1]) : value != value) return;
    // Indices rise, so an equal value that came before stays in front.
    size_t at = found < k ? found++ : k - 1;
    for (; at > 0 && value > values[at - 1]; --at) {
      values[at] = values[at - 1];
      ids[at] = ids[at - 1];
    }
    values[at] = value;
    ids[at] = static_cast<int32_t>(i);
  };
  size_t i = 0;
  for (; i < count && found < k; ++i) offer(i);
  for (; i + kLanes <= count; i += kLanes) {
    if (hn::AllFalse(d, hn::Gt(hn::LoadU(d, logits + i), hn::Set(d, values[k - 1])))) continue;
    for (size_t lane = 0; lane < kLanes; ++lane) offer(i + lane);
  }
  for (; i < count; ++i) offer(i);
  return found;
}

}  // namespace HWY_NAMESPACE
}  // namespace kdt::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kdt::kernels::cpu {

HWY_EXPORT(LogitsMax);
HWY_EXPORT(LogitsSumExp);
HWY_EXPORT(LogitsBest);

void LogitsTopK(Context& context, const LogitsTopKArgs& args) {
  KDT_CHECK(args.logits.dtype == DType::kF32 && args.logits.cols >= 1);
  KDT_CHECK(args.k >= 0 && args.k <= kMaxTopK && args.k <= args.logits.cols);
  const auto max = HWY_DYNAMIC_DISPATCH(LogitsMax);
  const auto sum_exp = HWY_DYNAMIC_DISPATCH(LogitsSumExp);
  const auto best = HWY_DYNAMIC_DISPATCH(LogitsBest);
  const int64_t vocab = args.logits.cols;
  ParallelRanges(context, args.logits.rows, 1, 4 * vocab, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* logits = args.logits.f32() + r * args.logits.stride;
      int32_t* ids = args.ids + r * args.k;
      float* values = args.values + r * args.k;
      max(logits, vocab, &args.max[r], &args.bad[r]);
      args.sum_exp[r] = sum_exp(logits, vocab, args.max[r]);
      int64_t found = static_cast<int64_t>(best(logits, vocab, args.k, ids, values));
      for (int64_t i = 0; i < found; ++i) ids[i] += static_cast<int32_t>(args.vocab_begin);
      for (; found < args.k; ++found) {
        ids[found] = -1;
        values[found] = -std::numeric_limits<float>::infinity();
      }
    }
  });
}

}  // namespace kdt::kernels::cpu
#endif  // HWY_ONCE
