// Vector helpers of the CPU ops, compiled once for each target. All of them give an element the same bits
// wherever in a vector or a tail it stands, so that no result depends on how work was cut.
#if defined(KDT_KERNELS_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDT_KERNELS_CPU_SIMD_INL_H_
#undef KDT_KERNELS_CPU_SIMD_INL_H_
#else
#define KDT_KERNELS_CPU_SIMD_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kdt::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;
inline constexpr size_t kLanes = hn::MaxLanes(DF());  // fixed for every target we build

// 32 vector registers (AVX-512, NEON) allow larger tiles than 16.
#if HWY_ARCH_X86 && HWY_TARGET > HWY_AVX3
inline constexpr bool kManyRegisters = false;
#else
inline constexpr bool kManyRegisters = true;
#endif

// First `count` < kLanes values, zeros behind them; reads nothing beyond.
HWY_INLINE VF LoadTail(DF d, const float* from, size_t count) {
  HWY_ALIGN float padded[kLanes] = {};
  std::memcpy(padded, from, count * sizeof(float));
  return hn::Load(d, padded);
}

HWY_INLINE void StoreTail(VF value, DF d, float* to, size_t count) {
  HWY_ALIGN float padded[kLanes];
  hn::Store(value, d, padded);
  std::memcpy(to, padded, count * sizeof(float));
}

// fn(value) for every vector of a row, with a padded tail: out[i] = fn(in[i]).
template <typename Fn>
HWY_INLINE void Transform(const float* in, float* out, size_t count, const Fn& fn) {
  const DF d;
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) hn::StoreU(fn(hn::LoadU(d, in + i)), d, out + i);
  if (i < count) StoreTail(fn(LoadTail(d, in + i, count - i)), d, out + i, count - i);
}

using D4 = hn::FixedTag<float, 4>;

// Sums of the blocks of four lanes, each block of `v` holding a partial sum of the same four outputs.
template <class D>
HWY_INLINE hn::Vec<D4> FoldBlocks(D d, hn::Vec<D> v) {
  if constexpr (hn::MaxLanes(D()) > 4) {
    const hn::Half<D> half;
    return FoldBlocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  } else {
    (void)d;
    return v;
  }
}

// In each block of four lanes: the sums of that block of a, b, c and e.
HWY_INLINE VF SumBlocks4(DF d, VF a, VF b, VF c, VF e) {
  const hn::Repartition<double, DF> d64;
  const VF ab = hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  const VF ce = hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e));
  const auto ab64 = hn::BitCast(d64, ab), ce64 = hn::BitCast(d64, ce);
  return hn::Add(hn::BitCast(d, hn::InterleaveLower(d64, ab64, ce64)),
                 hn::BitCast(d, hn::InterleaveUpper(d64, ab64, ce64)));
}

// The sums over all lanes of four vectors. The order of additions is the same for each of them.
HWY_INLINE hn::Vec<D4> SumLanes4(DF d, VF a, VF b, VF c, VF e) {
  return FoldBlocks(d, SumBlocks4(d, a, b, c, e));
}

// The same for one vector, in the same order.
HWY_INLINE float SumLanes(DF d, VF v) {
  const VF zero = hn::Zero(d);
  return hn::GetLane(SumLanes4(d, v, zero, zero, zero));
}

HWY_INLINE float MaxLane(DF d, VF v) { return hn::GetLane(hn::MaxOfLanes(d, v)); }

// bf16 -> float32 is a shift.
HWY_INLINE VF LoadBf16(DF d, const uint16_t* from) {
  const hn::Rebind<uint16_t, DF> d16;
  const hn::RebindToUnsigned<DF> d32;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, from))));
}

// e^x with an error of about one unit in the last place, subnormal results, 0 for -infinity and NaN for NaN.
// x = n ln 2 + r, |r| <= ln 2 / 2; e^r by its Taylor series to r^7 (remainder below 2^-27); 2^n in two
// factors, so that neither leaves the range of normal exponents.
HWY_INLINE VF Exp(DF d, VF x) {
  const hn::RebindToSigned<DF> di;
  const VF clamped = hn::Min(hn::Max(x, hn::Set(d, -105.0f)), hn::Set(d, 89.0f));
  const VF n = hn::Round(hn::Mul(clamped, hn::Set(d, 1.44269504f)));
  // ln 2 in two parts, the first with few enough bits that its product with n is exact.
  VF r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), clamped);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  VF p = hn::Set(d, 1.0f / 5040);
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 720));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 120));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 24));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 6));
  p = hn::MulAdd(p, r, hn::Set(d, 0.5f));
  p = hn::MulAdd(hn::Mul(r, r), p, r);
  p = hn::Add(p, hn::Set(d, 1.0f));
  const auto exponent = hn::ConvertTo(di, n);
  const auto half = hn::ShiftRight<1>(exponent);
  const auto bias = hn::Set(di, 127);
  const VF scale1 = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(half, bias)));
  const VF scale2 = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(hn::Sub(exponent, half), bias)));
  const VF result = hn::Mul(hn::Mul(p, scale1), scale2);
  return hn::IfThenElse(hn::IsNaN(x), x, result);
}

HWY_INLINE VF Sigmoid(DF d, VF x) {
  const VF one = hn::Set(d, 1.0f);
  return hn::Div(one, hn::Add(one, Exp(d, hn::Neg(x))));
}

HWY_INLINE VF Silu(DF d, VF x) { return hn::Div(x, hn::Add(hn::Set(d, 1.0f), Exp(d, hn::Neg(x)))); }

}  // namespace HWY_NAMESPACE
}  // namespace kdt::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // KDT_KERNELS_CPU_SIMD_INL_H_
