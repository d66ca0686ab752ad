// The argmax of perturbed logits, that is, a draw from softmax(logits / temperature).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gumbel_argmax.cc"
#include <algorithm>
#include <cmath>
#include <limits>

#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/gumbel-inl.h"
#include "kernels/cpu/ops.h"

HWY_BEFORE_NAMESPACE();
namespace kdt::kernels::cpu {
namespace HWY_NAMESPACE {

// Tokens are taken in groups of four, as the noise is made: lane l of vector j holds token 4 (group + l) + j.
// Each lane keeps its first best; the lanes' bests are compared at the end, equal ones by token.
void GumbelRow(const GumbelArgmaxArgs& args, int64_t row) {
  const DF d;
  const hn::RebindToSigned<DF> di;
  constexpr float kMasked = -std::numeric_limits<float>::infinity();
  constexpr int64_t kStep = 4 * kLanes;
  const float* logits = args.logits.f32() + row * args.logits.stride;
  const int64_t begin = args.vocab_begin, end = begin + args.logits.cols;
  const float temperature = args.temperature[row];
  const bool noisy = temperature > 0.0f;
  const VF inverse = hn::Set(d, noisy ? 1.0f / temperature : 1.0f);
  const uint64_t seed = args.seed[row], position = static_cast<uint64_t>(args.position[row]);
  VF best = hn::Set(d, kMasked);
  // A difference with itself is 0 for finite values alone.
  auto finite = hn::Eq(best, best);
  auto best_id = hn::Set(di, -1);
  bool edges_finite = true;
  for (int64_t token = begin / 4 * 4; token < end; token += kStep) {
    VF value[4];
    const bool inside = token >= begin && token + kStep <= end;
    if (inside) {
      hn::LoadInterleaved4(d, logits + (token - begin), value[0], value[1], value[2], value[3]);
      for (int j = 0; j < 4; ++j) {
        const VF zero = hn::Sub(value[j], value[j]);
        finite = hn::And(finite, hn::Eq(zero, zero));
      }
    } else {
      HWY_ALIGN float padded[kStep];
      std::fill(padded, padded + kStep, kMasked);
      const int64_t first = std::max(token, begin), last = std::min(token + kStep, end);
      std::copy(logits + (first - begin), logits + (last - begin), padded + (first - token));
      for (int64_t i = first; i < last; ++i) edges_finite = edges_finite && std::isfinite(logits[i - begin]);
      hn::LoadInterleaved4(d, padded, value[0], value[1], value[2], value[3]);
    }
    if (noisy) {
      VF noise[4];
      GumbelNoiseVector(seed, position, static_cast<uint32_t>(token / 4), noise);
      for (int j = 0; j < 4; ++j) value[j] = hn::Add(hn::Mul(value[j], inverse), noise[j]);
    }
    const auto ids = hn::ShiftLeft<2>(hn::Iota(di, static_cast<int32_t>(token / 4)));
    for (int j = 0; j < 4; ++j) {
      const auto better = hn::Gt(value[j], best);  // false for NaN and for masked ids
      best = hn::IfThenElse(better, value[j], best);
      best_id = hn::IfThenElse(hn::RebindMask(di, better), hn::Add(ids, hn::Set(di, j)), best_id);
    }
  }
  HWY_ALIGN float values[kLanes];
  HWY_ALIGN int32_t tokens[kLanes];
  hn::Store(best, d, values);
  hn::Store(best_id, di, tokens);
  size_t winner = 0;
  for (size_t lane = 1; lane < kLanes; ++lane) {
    if (tokens[lane] < 0) continue;
    const bool first = tokens[winner] < 0 || values[lane] > values[winner];
    if (first || (values[lane] == values[winner] && tokens[lane] < tokens[winner])) winner = lane;
  }
  args.id[row] = tokens[winner];
  args.value[row] = values[winner];
  if (args.bad != nullptr) args.bad[row] = edges_finite && hn::AllTrue(d, finite) ? 0 : 1;
}

}  // namespace HWY_NAMESPACE
}  // namespace kdt::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kdt::kernels::cpu {

HWY_EXPORT(GumbelRow);

void GumbelArgmax(Context& context, const GumbelArgmaxArgs& args) {
  KDT_CHECK(args.logits.dtype == DType::kF32 && args.vocab_begin >= 0);
  KDT_CHECK(args.logits.cols <= std::numeric_limits<int32_t>::max() - args.vocab_begin);
  const auto row = HWY_DYNAMIC_DISPATCH(GumbelRow);
  ParallelRanges(context, args.logits.rows, 1, 16 * args.logits.cols, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) row(args, r);
  });
}

}  // namespace kdt::kernels::cpu
#endif  // HWY_ONCE
