#include "common/rng.h"

#include <cmath>
#include <vector>

#include "tests/support/catch.h"

namespace kdt {
namespace {

// Reference for one word, in double.
double ExactExponential(uint32_t word) {
  return -std::log1p(-(static_cast<double>(word >> 1) + 0.5) * 0x1p-31);
}

TEST_CASE("Philox4x32-10 gives the published known answers") {
  const auto equals = [](PhiloxBlock got, std::vector<uint32_t> want) {
    return std::vector<uint32_t>(got.word, got.word + 4) == want;
  };
  CHECK(equals(Philox4x32(0, 0, {{0, 0, 0, 0}}), {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint32_t ones = 0xffffffff;
  CHECK(equals(Philox4x32(ones, ones, {{ones, ones, ones, ones}}),
               {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  CHECK(equals(Philox4x32(0xa4093822, 0x299f31d0, {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}),
               {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST_CASE("the logarithm is accurate over its whole range") {
  double worst = 0.0;
  for (float x = 0x1p-40f; x < 0x1p40f; x *= 1.00037f) {
    const double exact = std::log(static_cast<double>(x));
    worst = std::max(worst, std::abs(KdtLn(x) - exact) / std::max(std::abs(exact), 1e-2));
  }
  CHECK(worst < 2e-6);
}

TEST_CASE("noise is accurate for every kind of word, the tails included") {
  double worst_relative = 0.0, worst_absolute = 0.0;
  const auto check = [&](uint32_t word) {
    const double exact = ExactExponential(word);
    worst_relative = std::max(worst_relative, std::abs(ExponentialFromWord(word) - exact) / exact);
    worst_absolute = std::max(worst_absolute, std::abs(GumbelFromWord(word) + std::log(exact)));
  };
  for (uint64_t word = 0; word < (uint64_t{1} << 32); word += 65521) check(static_cast<uint32_t>(word));
  for (uint32_t i = 0; i < 5000; ++i) {
    check(i);
    check(~i);
    check((1u << 30) - 2500 + i);  // around the switch at t = 1/4
  }
  CHECK(worst_relative < 2e-6);
  CHECK(worst_absolute < 2e-6);
  CHECK(GumbelFromWord(0) == Catch::Approx(22.18).margin(0.01));
  CHECK(GumbelFromWord(0xffffffffu) == Catch::Approx(-3.10).margin(0.01));
}

TEST_CASE("noise depends on seed, position and token alone, and on all of them") {
  CHECK(GumbelNoise(7, 100, 41) == GumbelFromWord(NoiseWords(7, 100, 10).word[1]));
  CHECK(GumbelNoise(7, 100, 41) != GumbelNoise(8, 100, 41));
  CHECK(GumbelNoise(7, 100, 41) != GumbelNoise(7 + (uint64_t{1} << 32), 100, 41));
  CHECK(GumbelNoise(7, 100, 41) != GumbelNoise(7, 101, 41));
  CHECK(GumbelNoise(7, 100, 41) != GumbelNoise(7, 100 + (uint64_t{1} << 32), 41));
  CHECK(GumbelNoise(7, 100, 41) != GumbelNoise(7, 100, 42));
}

TEST_CASE("argmax(logit + noise) draws from the softmax") {
  // 24 tokens with probabilities from 0.3 down to about 2e-4.
  constexpr int kTokens = 24;
  constexpr int kDraws = 100000;
  std::vector<double> probability(kTokens);
  double total = 0.0;
  for (int i = 0; i < kTokens; ++i) total += probability[static_cast<size_t>(i)] = std::exp(-0.33 * i);
  std::vector<float> logit;
  for (double& p : probability) logit.push_back(static_cast<float>(std::log(p /= total)));
  std::vector<int> count(kTokens, 0);
  for (int draw = 0; draw < kDraws; ++draw) {
    int best = 0;
    float best_value = -INFINITY;
    for (int token = 0; token < kTokens; ++token) {
      // Seeds and positions both vary, as over requests and over one request's text.
      const float value = logit[static_cast<size_t>(token)] + GumbelNoise(static_cast<uint64_t>(draw) >> 3,
                                                                          static_cast<uint64_t>(draw) & 7,
                                                                          static_cast<uint32_t>(token));
      if (value > best_value) best_value = value, best = token;
    }
    ++count[static_cast<size_t>(best)];
  }
  double chi_square = 0.0;
  for (size_t i = 0; i < kTokens; ++i) {
    const double expected = probability[i] * kDraws;
    REQUIRE(expected > 5.0);
    chi_square += (count[i] - expected) * (count[i] - expected) / expected;
  }
  // 23 degrees of freedom: the 99.9% quantile is 49.73. The draws are fixed, so the test cannot fail by
  // chance.
  CHECK(chi_square < 49.73);
}

}  // namespace
}  // namespace kdt
