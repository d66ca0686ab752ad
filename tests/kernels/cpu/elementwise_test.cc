// Ops that work on one row at a time: embedding, norms, sums, gated SiLU and rope.
#include "tests/kernels/cpu/util.h"

namespace kdt::kernels::test {
namespace {

TEST_CASE("embedding takes this rank's rows and zeros for the others", "[embedding]") {
  std::mt19937 rng(6);
  Bf16Matrix table(10, 33);
  table.Fill(rng);
  Matrix out(4, 33, 1);
  const int32_t ids[] = {20, 29, 19, 30};
  REQUIRE(MakeBackend(2)->Embedding({ids, 20, table.tensor(), out.tensor()}).ok());
  for (int64_t c = 0; c < 33; ++c) {
    CHECK(out.at(0, c) == table.at(0, c));
    CHECK(out.at(1, c) == table.at(9, c));
    CHECK(out.at(2, c) == 0.0f);
    CHECK(out.at(3, c) == 0.0f);
  }
  CHECK(out.GapsUntouched());
}

TEST_CASE("embedding gathers rows of a float32 table", "[embedding]") {
  std::mt19937 rng(8);
  Matrix table(6, 33, 2), out(3, 33, 1);
  table.Fill(rng);
  const int32_t rows[] = {5, 0, 5};
  REQUIRE(MakeBackend(2)->Embedding({rows, 0, table.tensor(), out.tensor()}).ok());
  for (int64_t r = 0; r < 3; ++r) {
    for (int64_t c = 0; c < 33; ++c) CHECK(out.at(r, c) == table.at(rows[r], c));
  }
  CHECK(out.GapsUntouched());
}

TEST_CASE("rms_norm agrees with float64, with and without a residual", "[rms_norm]") {
  std::mt19937 rng(7);
  const auto backend = MakeBackend(2);
  for (const int64_t n : {1, 5, 16, 100, 256, 1537}) {
    for (const bool with_residual : {false, true}) {
      Matrix x(6, n, 2), residual(6, n, 1), out(6, n, 3);
      Bf16Matrix weight(1, n);
      x.Fill(rng);
      residual.Fill(rng);
      weight.Fill(rng);
      const Matrix before = residual;
      RmsNormArgs args{x.tensor(), {}, weight.bits.data(), 1e-5f, out.tensor()};
      if (with_residual) args.residual = residual.tensor();
      REQUIRE(backend->RmsNorm(args).ok());
      for (int64_t r = 0; r < 6; ++r) {
        std::vector<double> v(n);
        double squares = 0;
        for (int64_t c = 0; c < n; ++c) {
          const float sum = before.at(r, c) + x.at(r, c);
          v[c] = with_residual ? sum : x.at(r, c);
          squares += v[c] * v[c];
          if (with_residual) REQUIRE(residual.at(r, c) == sum);
        }
        const double factor = 1 / std::sqrt(squares / n + 1e-5);
        for (int64_t c = 0; c < n; ++c) {
          const double expected = v[c] * factor * weight.at(0, c);
          REQUIRE(std::abs(out.at(r, c) - expected) <= 1e-6 * std::abs(expected) + 1e-12);
        }
      }
      CHECK(out.GapsUntouched());
      CHECK(residual.GapsUntouched());
    }
  }
}

TEST_CASE("rms_norm in place, and of zeros", "[rms_norm]") {
  std::mt19937 rng(8);
  Matrix x(2, 40), out(2, 40);
  x.Fill(rng);
  std::fill(x.row(1), x.row(1) + 40, 0.0f);
  Bf16Matrix weight(1, 40);
  weight.Fill(rng);
  const auto backend = MakeBackend();
  REQUIRE(backend->RmsNorm({x.tensor(), {}, weight.bits.data(), 1e-5f, out.tensor()}).ok());
  REQUIRE(backend->RmsNorm({x.tensor(), {}, weight.bits.data(), 1e-5f, x.tensor()}).ok());
  CHECK(SameBits(x, out));
  for (int64_t c = 0; c < 40; ++c) CHECK(out.at(1, c) == 0.0f);
}

TEST_CASE("add", "[add]") {
  std::mt19937 rng(9);
  Matrix x(3, 37), sum(3, 37, 2);
  x.Fill(rng);
  sum.Fill(rng);
  const Matrix before = sum;
  REQUIRE(MakeBackend()->Add({x.tensor(), sum.tensor()}).ok());
  for (int64_t r = 0; r < 3; ++r) {
    for (int64_t c = 0; c < 37; ++c) CHECK(sum.at(r, c) == before.at(r, c) + x.at(r, c));
  }
  CHECK(sum.GapsUntouched());
}

TEST_CASE("silu_mul agrees with float64, extremes included", "[silu_mul]") {
  std::mt19937 rng(10);
  for (const int64_t n : {1, 15, 16, 256}) {
    Matrix x(3, 2 * n, 1), out(3, n, 1);
    x.Fill(rng, 5.0f);
    x.at(0, 0) = -200.0f;
    x.at(1, 0) = 200.0f;
    x.at(2, 0) = 0.0f;
    REQUIRE(MakeBackend()->SiluMul({x.tensor(), out.tensor()}).ok());
    for (int64_t r = 0; r < 3; ++r) {
      for (int64_t c = 0; c < n; ++c) {
        const double gate = x.at(r, c), expected = gate / (1 + std::exp(-gate)) * x.at(r, n + c);
        CHECK(std::abs(out.at(r, c) - expected) <= 5e-7 * std::abs(expected) + 1e-30);
      }
    }
    CHECK(out.GapsUntouched());
  }
}

TEST_CASE("rope turns pairs by position times frequency in both layouts", "[rope]") {
  std::mt19937 rng(11);
  constexpr int64_t kHeads = 3, kDim = 10, kOffset = 4, kHead = 16;
  float inv_freq[kDim / 2];
  for (int i = 0; i < kDim / 2; ++i) inv_freq[i] = std::pow(50000.0f, -2.0f * static_cast<float>(i) / kDim);
  const int32_t positions[] = {0, 1, 4095, 262143};
  for (const RopeLayout layout : {RopeLayout::kInterleaved, RopeLayout::kHalfSplit}) {
    Matrix x(4, kHeads * kHead, 2);
    x.Fill(rng);
    const Matrix before = x;
    const RopeArgs args{x.tensor(), kHeads, kHead, kOffset, kDim, positions, inv_freq, 1.25f, layout};
    REQUIRE(MakeBackend(2)->Rope(args).ok());
    for (int64_t r = 0; r < 4; ++r) {
      for (int64_t h = 0; h < kHeads; ++h) {
        for (int64_t i = 0; i < kHead; ++i) {
          if (i >= kOffset && i < kOffset + kDim) continue;
          REQUIRE(x.at(r, h * kHead + i) == before.at(r, h * kHead + i));
        }
        for (int64_t i = 0; i < kDim / 2; ++i) {
          const bool interleaved = layout == RopeLayout::kInterleaved;
          const int64_t first = h * kHead + kOffset + (interleaved ? 2 * i : i);
          const int64_t second = first + (interleaved ? 1 : kDim / 2);
          // The reference multiplies in float32, so the angle is rounded before cos and sin.
          const double angle = static_cast<float>(positions[r]) * inv_freq[i];
          const double a = before.at(r, first), b = before.at(r, second);
          CHECK(std::abs(x.at(r, first) - 1.25 * (a * std::cos(angle) - b * std::sin(angle))) < 2e-6);
          CHECK(std::abs(x.at(r, second) - 1.25 * (b * std::cos(angle) + a * std::sin(angle))) < 2e-6);
        }
      }
    }
    CHECK(x.GapsUntouched());
  }
}

}  // namespace
}  // namespace kdt::kernels::test
