// Counter-based noise for sampling: the same bits on every rank, on the CPU (scalar and SIMD) and on CUDA.
//
// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11) with
//   key     = seed (low word, high word)
//   counter = (token >> 2, position low, position high, 0); the word used is token & 3
// gives one 32-bit word for each (seed, position, token). Word -> Gumbel noise, all in float32 and in exactly
// these steps:
//   k = word >> 1                       31 bits, so that int -> float conversion works as signed in every
//   SIMD set t = (float(k) + 0.5) * 2^-31        in (0, 1]: how far u = 1 - t lies below 1 E = -ln(1 - t)
//   standard exponential g = -ln(E)                          standard Gumbel, from -3.1 to 22.2
// A large g needs u next to 1, where float32 has only 2^-24 steps and u itself can round to 1 (g = infinity).
// So E is computed from t when t < 1/4 (full relative precision, the tail is smooth down to probability
// 2^-32), and from x = (float(2^31-1 - k) + 0.5) * 2^-31 = 1 - t otherwise.
//
// Only +, *, fma, conversions and integer operations are used, each correctly rounded everywhere; build
// without floating-point contraction (cmake/KdtOptions.cmake) and use KdtFma for every fused operation.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define KDT_HD __host__ __device__
#else
#define KDT_HD
#endif

namespace kdt {

inline constexpr uint32_t kPhiloxMul0 = 0xD2511F53u;
inline constexpr uint32_t kPhiloxMul1 = 0xCD9E8D57u;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u;
inline constexpr uint32_t kPhiloxWeyl1 = 0xBB67AE85u;
inline constexpr int kPhiloxRounds = 10;

struct PhiloxBlock {
  uint32_t word[4];
};

KDT_HD constexpr PhiloxBlock Philox4x32(uint32_t key0, uint32_t key1, PhiloxBlock counter) {
  uint32_t c0 = counter.word[0], c1 = counter.word[1], c2 = counter.word[2], c3 = counter.word[3];
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(kPhiloxMul0) * c0;
    const uint64_t p1 = static_cast<uint64_t>(kPhiloxMul1) * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ key0;
    const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ key1;
    c0 = n0;
    c1 = static_cast<uint32_t>(p1);
    c2 = n2;
    c3 = static_cast<uint32_t>(p0);
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

// The words of tokens 4*token_group .. 4*token_group + 3.
KDT_HD constexpr PhiloxBlock NoiseWords(uint64_t seed, uint64_t position, uint32_t token_group) {
  return Philox4x32(
      static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
      {{token_group, static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0}});
}

KDT_HD inline float KdtFma(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// ln(1 + f) = f + f^2 * (c0 + c1 f + ... + c7 f^7), relative error below 2e-7 for sqrt(1/2) - 1 <= f <=
// sqrt(2) - 1. A weighted least-squares fit of our own; evaluated by Horner's rule with KdtFma from c7 down.
inline constexpr int kLnTerms = 8;
#define KDT_LN_COEFFICIENTS                                                                               \
  {                                                                                                       \
    -0.499999821f, 0.333339334f, -0.250025898f, 0.199634567f, -0.165516376f, 0.148837656f, -0.144280851f, \
        0.0898082405f                                                                                     \
  }
inline constexpr float kLnCoefficients[kLnTerms] = KDT_LN_COEFFICIENTS;
inline constexpr float kLn2 = 0.693147181f;
inline constexpr uint32_t kSqrtHalfBits = 0x3f3504f3u;  // float bits of sqrt(1/2)

// ln(1 + f) + e * ln 2 by the polynomial above.
KDT_HD inline float LnFromParts(float f, float e) {
  constexpr float c[kLnTerms] = KDT_LN_COEFFICIENTS;
  float r = c[kLnTerms - 1];
  for (int i = kLnTerms - 2; i >= 0; --i) r = KdtFma(r, f, c[i]);
  return KdtFma(e, kLn2, KdtFma(f * f, r, f));
}

// x = 2^e * (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)); x positive and normal.
KDT_HD inline void LnSplit(float x, float* f, float* e) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  bits -= kSqrtHalfBits;
  // Arithmetic shift of the signed difference, then the mantissa put back over sqrt(1/2).
  *e = static_cast<float>(static_cast<int32_t>(bits) >> 23);
  bits = (bits & 0x007fffffu) + kSqrtHalfBits;
  float m;
  memcpy(&m, &bits, sizeof(m));
  *f = m - 1.0f;
}

// Natural logarithm of a positive normal float.
KDT_HD inline float KdtLn(float x) {
  float f, e;
  LnSplit(x, &f, &e);
  return LnFromParts(f, e);
}

// Uniform word -> standard exponential variate E = -ln(1 - t), t as above.
KDT_HD inline float ExponentialFromWord(uint32_t word) {
  const int32_t k = static_cast<int32_t>(word >> 1);
  const float t = (static_cast<float>(k) + 0.5f) * 0x1p-31f;
  const float x = (static_cast<float>(0x7fffffff - k) + 0.5f) * 0x1p-31f;
  float f, e;
  LnSplit(x, &f, &e);
  const bool near_one = t < 0.25f;
  return -LnFromParts(near_one ? -t : f, near_one ? 0.0f : e);
}

KDT_HD inline float GumbelFromWord(uint32_t word) { return -KdtLn(ExponentialFromWord(word)); }

// The noise of one token at one absolute position for a request's seed.
KDT_HD inline float GumbelNoise(uint64_t seed, uint64_t position, uint32_t token) {
  return GumbelFromWord(NoiseWords(seed, position, token >> 2).word[token & 3]);
}

}  // namespace kdt
