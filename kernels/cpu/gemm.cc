// y (+)= x W^T with bf16 weights, and the gated SiLU behind gate and up projections.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gemm.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/dot-inl.h"
#include "kernels/cpu/ops.h"

HWY_BEFORE_NAMESPACE();
namespace kdt::kernels::cpu {
namespace HWY_NAMESPACE {

void GemmTarget(Context& context, const GemmArgs& args) {
  const int64_t rows = args.x.rows, inputs = args.w.cols, outs = args.w.rows;
  const int64_t packed_stride = static_cast<int64_t>(PackedSize(inputs));
  float* packed = context.scratch[0].Get<float>(rows * packed_stride);
  ParallelRanges(context, rows, 1, inputs / 8, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      PackRow(args.x.f32() + r * args.x.stride, inputs, packed + r * packed_stride);
  });
  ParallelRanges(context, outs, kTileOuts, inputs * rows, [&](int64_t begin, int64_t end) {
    DotAll(packed, packed_stride, rows, args.w.bf16() + begin * args.w.stride, args.w.stride, inputs,
           end - begin, args.y.f32() + begin, args.y.stride, args.accumulate);
  });
}

void SiluMulRow(const float* gate, const float* up, size_t count, float* out) {
  const DF d;
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    hn::StoreU(hn::Mul(Silu(d, hn::LoadU(d, gate + i)), hn::LoadU(d, up + i)), d, out + i);
  }
  if (i == count) return;
  const VF product = hn::Mul(Silu(d, LoadTail(d, gate + i, count - i)), LoadTail(d, up + i, count - i));
  StoreTail(product, d, out + i, count - i);
}

}  // namespace HWY_NAMESPACE
}  // namespace kdt::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kdt::kernels::cpu {

HWY_EXPORT(GemmTarget);
HWY_EXPORT(SiluMulRow);

namespace {

void Beside(Context& context, const GemmArgs& args) {
  if (!args.beside_gated) return Gemm(context, {args.x, args.beside_w, args.beside_y});
  const int64_t outs = args.beside_w.rows;
  const Tensor gate_up =
      MakeTensor(context.scratch[1].Get<float>(args.x.rows * outs), DType::kF32, args.x.rows, outs);
  Gemm(context, {args.x, args.beside_w, gate_up});
  SiluMul(context, {gate_up, args.beside_y});
}

}  // namespace

void Gemm(Context& context, const GemmArgs& args) {
  KDT_CHECK(args.x.dtype == DType::kF32 && args.w.dtype == DType::kBF16 && args.y.dtype == DType::kF32);
  KDT_CHECK(args.w.cols * (args.gated ? 2 : 1) == args.x.cols && args.y.rows == args.x.rows &&
            args.y.cols == args.w.rows);
  KDT_CHECK(args.beside_w.rows == 0 || !args.gated);
  if (args.x.rows == 0) return;
  if (args.beside_w.rows > 0) Beside(context, args);
  if (args.w.rows == 0) return;
  if (!args.gated) return HWY_DYNAMIC_DISPATCH(GemmTarget)(context, args);
  GemmArgs plain = args;
  plain.gated = false;
  plain.x = MakeTensor(context.scratch[1].Get<float>(args.x.rows * args.w.cols), DType::kF32, args.x.rows,
                       args.w.cols);
  SiluMul(context, {args.x, plain.x});
  HWY_DYNAMIC_DISPATCH(GemmTarget)(context, plain);
}

void SiluMul(Context& context, const SiluMulArgs& args) {
  KDT_CHECK(args.x.cols == 2 * args.out.cols && args.x.rows == args.out.rows);
  const auto row = HWY_DYNAMIC_DISPATCH(SiluMulRow);
  const int64_t n = args.out.cols;
  ParallelRanges(context, args.x.rows, 1, 8 * n, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* gate = args.x.f32() + r * args.x.stride;
      row(gate, gate + n, n, args.out.f32() + r * args.out.stride);
    }
  });
}

}  // namespace kdt::kernels::cpu
#endif  // HWY_ONCE
