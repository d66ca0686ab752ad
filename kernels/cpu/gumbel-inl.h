// The Gumbel noise of common/rng.h for many tokens at once, bit for bit.
#if defined(KDT_KERNELS_CPU_GUMBEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDT_KERNELS_CPU_GUMBEL_INL_H_
#undef KDT_KERNELS_CPU_GUMBEL_INL_H_
#else
#define KDT_KERNELS_CPU_GUMBEL_INL_H_
#endif

#include "common/rng.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kdt::kernels::cpu {
namespace HWY_NAMESPACE {

using DNoise = hn::RebindToUnsigned<DF>;
using VNoise = hn::Vec<DNoise>;

// The two halves of a * factor.
HWY_INLINE void MulWide(VNoise a, uint32_t factor, VNoise& high, VNoise& low) {
  const DNoise d;
  const hn::Repartition<uint64_t, DNoise> d64;
  const VNoise factors = hn::Set(d, factor);
  const auto even = hn::MulEven(a, factors);
  const auto odd = hn::MulEven(hn::BitCast(d, hn::ShiftRight<32>(hn::BitCast(d64, a))), factors);
  low = hn::OddEven(hn::BitCast(d, hn::ShiftLeft<32>(odd)), hn::BitCast(d, even));
  high = hn::OddEven(hn::BitCast(d, odd), hn::BitCast(d, hn::ShiftRight<32>(even)));
}

// words[j], lane l: the word of token 4 (group + l) + j.
HWY_INLINE void NoiseWordsVector(uint64_t seed, uint64_t position, uint32_t group, VNoise (&words)[4]) {
  const DNoise d;
  VNoise c0 = hn::Iota(d, group);
  VNoise c1 = hn::Set(d, static_cast<uint32_t>(position)),
         c2 = hn::Set(d, static_cast<uint32_t>(position >> 32));
  VNoise c3 = hn::Zero(d);
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    VNoise high0, low0, high1, low1;
    MulWide(c0, kPhiloxMul0, high0, low0);
    MulWide(c2, kPhiloxMul1, high1, low1);
    c0 = hn::Xor(hn::Xor(high1, c1), hn::Set(d, key0));
    c2 = hn::Xor(hn::Xor(high0, c3), hn::Set(d, key1));
    c1 = low1;
    c3 = low0;
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

HWY_INLINE void LnSplitVector(VF x, VF& f, VF& e) {
  const DF d;
  const DNoise du;
  const hn::RebindToSigned<DF> di;
  const VNoise sqrt_half = hn::Set(du, kSqrtHalfBits);
  const VNoise bits = hn::Sub(hn::BitCast(du, x), sqrt_half);
  e = hn::ConvertTo(d, hn::ShiftRight<23>(hn::BitCast(di, bits)));
  f = hn::Sub(hn::BitCast(d, hn::Add(hn::And(bits, hn::Set(du, 0x007fffffu)), sqrt_half)), hn::Set(d, 1.0f));
}

HWY_INLINE VF LnFromPartsVector(VF f, VF e) {
  const DF d;
  VF r = hn::Set(d, kLnCoefficients[kLnTerms - 1]);
  HWY_UNROLL(8)
  for (int i = kLnTerms - 2; i >= 0; --i) r = hn::MulAdd(r, f, hn::Set(d, kLnCoefficients[i]));
  return hn::MulAdd(e, hn::Set(d, kLn2), hn::MulAdd(hn::Mul(f, f), r, f));
}

HWY_INLINE VF GumbelFromWords(VNoise words) {
  const DF d;
  const hn::RebindToSigned<DF> di;
  const VF half = hn::Set(d, 0.5f), unit = hn::Set(d, 0x1p-31f);
  const auto k = hn::BitCast(di, hn::ShiftRight<1>(words));
  const VF t = hn::Mul(hn::Add(hn::ConvertTo(d, k), half), unit);
  const VF x = hn::Mul(hn::Add(hn::ConvertTo(d, hn::Sub(hn::Set(di, 0x7fffffff), k)), half), unit);
  VF f, e;
  LnSplitVector(x, f, e);
  const auto near_one = hn::Lt(t, hn::Set(d, 0.25f));
  f = hn::IfThenElse(near_one, hn::Neg(t), f);
  e = hn::IfThenElse(near_one, hn::Zero(d), e);
  LnSplitVector(hn::Neg(LnFromPartsVector(f, e)), f, e);
  return hn::Neg(LnFromPartsVector(f, e));
}

// noise[j], lane l: the noise of token 4 (group + l) + j.
HWY_INLINE void GumbelNoiseVector(uint64_t seed, uint64_t position, uint32_t group, VF (&noise)[4]) {
#if HWY_ARCH_X86 && HWY_TARGET > HWY_AVX2
  // No fused multiply-add here, and the polynomial is defined with it.
  const DF d;
  HWY_ALIGN float values[4][kLanes];
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    const PhiloxBlock block = NoiseWords(seed, position, group + lane);
    for (int j = 0; j < 4; ++j) values[j][lane] = GumbelFromWord(block.word[j]);
  }
  for (int j = 0; j < 4; ++j) noise[j] = hn::Load(d, values[j]);
#else
  VNoise words[4];
  NoiseWordsVector(seed, position, group, words);
  HWY_UNROLL(4)
  for (int j = 0; j < 4; ++j) noise[j] = GumbelFromWords(words[j]);
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace kdt::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // KDT_KERNELS_CPU_GUMBEL_INL_H_
