// Root-mean-square norm with an optional residual sum in front of it.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rms_norm.cc"
#include <cmath>

#include "common/bf16.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kdt::kernels::cpu {
namespace HWY_NAMESPACE {

void AddRow(const float* x, float* sum, size_t n) {
  const DF d;
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    hn::StoreU(hn::Add(hn::LoadU(d, sum + i), hn::LoadU(d, x + i)), d, sum + i);
  for (; i < n; ++i) sum[i] += x[i];
}

void RmsNormRow(const float* x, const uint16_t* weight, float eps, size_t n, float* out) {
  const DF d;
  VF squares = hn::Zero(d);
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const VF v = hn::LoadU(d, x + i);
    squares = hn::MulAdd(v, v, squares);
  }
  if (i < n) {
    const VF v = LoadTail(d, x + i, n - i);
    squares = hn::MulAdd(v, v, squares);
  }
  const float mean = SumLanes(d, squares) / static_cast<float>(n);
  const float factor = 1.0f / std::sqrt(mean + eps);
  const VF factors = hn::Set(d, factor);
  for (i = 0; i + kLanes <= n; i += kLanes) {
    hn::StoreU(hn::Mul(LoadBf16(d, weight + i), hn::Mul(hn::LoadU(d, x + i), factors)), d, out + i);
  }
  for (; i < n; ++i) out[i] = Bf16ToFloat(weight[i]) * (x[i] * factor);
}

}  // namespace HWY_NAMESPACE
}  // namespace kdt::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kdt::kernels::cpu {

HWY_EXPORT(AddRow);
HWY_EXPORT(RmsNormRow);

void RmsNorm(Context& context, const RmsNormArgs& args) {
  KDT_CHECK(args.x.dtype == DType::kF32 && args.out.dtype == DType::kF32);
  KDT_CHECK(args.out.rows == args.x.rows && args.out.cols == args.x.cols);
  const bool residual = args.residual.data != nullptr;
  KDT_CHECK(!residual || (args.residual.rows == args.x.rows && args.residual.cols == args.x.cols));
  const auto add = HWY_DYNAMIC_DISPATCH(AddRow);
  const auto norm = HWY_DYNAMIC_DISPATCH(RmsNormRow);
  ParallelRanges(context, args.x.rows, 1, 2 * args.x.cols, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* row = args.x.f32() + r * args.x.stride;
      if (residual) {
        float* sum = args.residual.f32() + r * args.residual.stride;
        add(row, sum, args.x.cols);
        row = sum;
      }
      norm(row, args.weight, args.eps, args.x.cols, args.out.f32() + r * args.out.stride);
    }
  });
}

void Add(Context& context, const AddArgs& args) {
  KDT_CHECK(args.x.dtype == DType::kF32 && args.residual.dtype == DType::kF32);
  KDT_CHECK(args.residual.rows == args.x.rows && args.residual.cols == args.x.cols);
  const auto add = HWY_DYNAMIC_DISPATCH(AddRow);
  ParallelRanges(context, args.x.rows, 1, args.x.cols, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      add(args.x.f32() + r * args.x.stride, args.residual.f32() + r * args.residual.stride, args.x.cols);
    }
  });
}

}  // namespace kdt::kernels::cpu
#endif  // HWY_ONCE
