#include "kdt/kernels/moe.h"

#include <algorithm>
#include <numeric>

#include "tests/kernels/cpu/util.h"

namespace kdt::kernels::test {
namespace {

struct Experts {
  Experts(int64_t experts, int64_t first, int64_t hidden, int64_t inner, std::mt19937& rng)
      : gate_up(experts * 2 * inner * hidden / 8),
        down(experts * hidden * inner / 8),
        gate_up_scale(experts * 2 * inner * hidden / 32),
        down_scale(experts * hidden * inner / 32) {
    std::uniform_real_distribution<float> scale(0.005f, 0.02f);
    for (uint32_t& word : gate_up) word = rng();
    for (uint32_t& word : down) word = rng();
    for (uint16_t& value : gate_up_scale) value = FloatToBf16(scale(rng));
    for (uint16_t& value : down_scale) value = FloatToBf16(scale(rng));
    view = {experts,          first, hidden, inner, gate_up.data(), gate_up_scale.data(), down.data(),
            down_scale.data()};
  }

  static double At(const std::vector<uint32_t>& packed, const std::vector<uint16_t>& scales, int64_t row,
                   int64_t i, int64_t inputs) {
    const int q = static_cast<int>(packed[row * inputs / 8 + i / 8] >> (4 * (i % 8)) & 15) - 8;
    return q * static_cast<double>(Bf16ToFloat(scales[row * inputs / 32 + i / 32]));
  }

  std::vector<uint32_t> gate_up, down;
  std::vector<uint16_t> gate_up_scale, down_scale;
  Int4Experts view;
};

struct Routing {
  Routing(int64_t rows, int64_t top_k, int64_t all_experts, std::mt19937& rng)
      : ids(rows * top_k), weights(rows * top_k) {
    std::vector<int32_t> order(all_experts);
    std::iota(order.begin(), order.end(), 0);
    for (int64_t r = 0; r < rows; ++r) {
      std::shuffle(order.begin(), order.end(), rng);
      std::copy(order.begin(), order.begin() + top_k, ids.begin() + r * top_k);
      std::sort(ids.begin() + r * top_k, ids.begin() + (r + 1) * top_k);
    }
    for (float& weight : weights) weight = std::uniform_real_distribution<float>(0.1f, 1.0f)(rng);
  }
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

std::vector<double> Reference(const Experts& e, const float* x, const int32_t* ids, const float* weights,
                              int64_t top_k) {
  const int64_t hidden = e.view.hidden, inner = e.view.inner;
  std::vector<double> out(hidden);
  for (int64_t k = 0; k < top_k; ++k) {
    const int64_t expert = ids[k] - e.view.first_expert;
    if (expert < 0 || expert >= e.view.experts) continue;
    std::vector<double> act(inner);
    for (int64_t j = 0; j < inner; ++j) {
      double gate = 0, up = 0;
      for (int64_t i = 0; i < hidden; ++i) {
        gate += x[i] * Experts::At(e.gate_up, e.gate_up_scale, expert * 2 * inner + j, i, hidden);
        up += x[i] * Experts::At(e.gate_up, e.gate_up_scale, expert * 2 * inner + inner + j, i, hidden);
      }
      act[j] = gate / (1 + std::exp(-gate)) * up;
    }
    for (int64_t o = 0; o < hidden; ++o) {
      double sum = 0;
      for (int64_t j = 0; j < inner; ++j)
        sum += act[j] * Experts::At(e.down, e.down_scale, expert * hidden + o, j, inner);
      out[o] += weights[k] * sum;
    }
  }
  return out;
}

TEST_CASE("moe agrees with float64, whole experts and slices, held and not held", "[moe]") {
  std::mt19937 rng(14);
  const auto backend = MakeBackend(2);
  struct Shape {
    int64_t rows, hidden, inner, experts, first;
  };
  for (const Shape& s : {Shape{1, 256, 256, 16, 0}, Shape{13, 256, 32, 16, 0}, Shape{20, 96, 64, 4, 8},
                         Shape{3, 128, 128, 16, 0}}) {
    for (const bool accumulate : {false, true}) {
      constexpr int64_t kTopK = 4;
      Experts experts(s.experts, s.first, s.hidden, s.inner, rng);
      Routing routing(s.rows, kTopK, 16, rng);
      Matrix x(s.rows, s.hidden, 2), out(s.rows, s.hidden, 1);
      x.Fill(rng);
      out.Fill(rng);
      const Matrix before = out;
      REQUIRE(backend
                  ->Moe({x.tensor(), experts.view, routing.ids.data(), routing.weights.data(), kTopK,
                         out.tensor(), accumulate})
                  .ok());
      double worst = 0, size = 0;
      for (int64_t r = 0; r < s.rows; ++r) {
        const std::vector<double> expected =
            Reference(experts, x.row(r), &routing.ids[r * kTopK], &routing.weights[r * kTopK], kTopK);
        for (int64_t o = 0; o < s.hidden; ++o) {
          const double full = expected[o] + (accumulate ? before.at(r, o) : 0.0f);
          worst = std::max(worst, std::abs(out.at(r, o) - full));
          size = std::max(size, std::abs(full));
        }
      }
      INFO(s.rows << " rows, hidden " << s.hidden << ", inner " << s.inner);
      CHECK(worst < 2e-6 * size);
      CHECK(out.GapsUntouched());
    }
  }
}

TEST_CASE("a moe row has the same bits alone, in any batch and with any thread count", "[moe][bits]") {
  std::mt19937 rng(15);
  constexpr int64_t kRows = 96, kHidden = 256, kInner = 64, kTopK = 4;
  Experts experts(16, 0, kHidden, kInner, rng);
  Routing routing(kRows, kTopK, 16, rng);
  Matrix x(kRows, kHidden), alone(kRows, kHidden);
  x.Fill(rng);
  const auto run = [&](Backend& backend, int64_t row, int64_t rows, Tensor out) {
    REQUIRE(backend
                .Moe({x.tensor().Rows(row, rows), experts.view, &routing.ids[row * kTopK],
                      &routing.weights[row * kTopK], kTopK, out})
                .ok());
  };
  const auto single = MakeBackend(1);
  for (int64_t r = 0; r < kRows; ++r) run(*single, r, 1, alone.tensor().Rows(r, 1));
  for (const int threads : {1, 2, 3}) {
    const auto backend = MakeBackend(threads);
    for (const int64_t rows : {2, 8, 33, 96}) {
      Matrix out(rows, kHidden);
      run(*backend, kRows - rows, rows, out.tensor());
      bool same = true;
      for (int64_t r = 0; r < rows; ++r)
        same = same && SameBits(out.row(r), alone.row(kRows - rows + r), kHidden);
      CHECK(same);
    }
  }
}

TEST_CASE("moe without rows, and a row whose experts are all elsewhere", "[moe]") {
  std::mt19937 rng(16);
  Experts experts(2, 4, 32, 32, rng);
  Matrix x(1, 32), out(1, 32);
  x.Fill(rng);
  const int32_t ids[] = {0, 7};
  const float weights[] = {1.0f, 1.0f};
  const auto backend = MakeBackend(2);
  REQUIRE(backend->Moe({x.tensor(), experts.view, ids, weights, 2, out.tensor()}).ok());
  for (int64_t c = 0; c < 32; ++c) CHECK(out.at(0, c) == 0.0f);
  REQUIRE(backend->Moe({x.tensor().Rows(0, 0), experts.view, ids, weights, 2, out.tensor().Rows(0, 0)}).ok());
}

TEST_CASE("a choice and shared experts inside moe have the bits of the router's op and moe", "[moe][bits]") {
  std::mt19937 rng(17);
  constexpr int64_t kRows = 7, kHidden = 96, kInner = 32, kExperts = 12, kTopK = 4, kShared = 48;
  Experts experts(5, 4, kHidden, kInner, rng);
  Matrix x(kRows, kHidden), bias(1, kExperts), inner(kRows, 2 * kShared), apart(kRows, kHidden),
      together(kRows, kHidden), scores(kRows, kExperts), activated(kRows, kShared);
  Bf16Matrix w(kExperts, kHidden), gate_up(2 * kShared, kHidden), down(kHidden, kShared);
  x.Fill(rng);
  bias.Fill(rng, 0.1f);
  w.Fill(rng, 0.2f);
  gate_up.Fill(rng, 0.1f);
  down.Fill(rng, 0.1f);
  const int32_t row_count = 5;
  for (const int threads : {1, 2}) {
    const auto backend = MakeBackend(threads);
    std::vector<int32_t> ids(kRows * kTopK), chosen(kRows * kTopK, 77);
    std::vector<float> weights(kRows * kTopK), chosen_weights(kRows * kTopK, 77);
    RouterArgs router{x.tensor(), w.tensor(), bias.row(0), kTopK, true, 2.5f, ids.data(), weights.data()};
    router.row_count = &row_count;
    router.shared_gate_up = gate_up.tensor(), router.shared_down = down.tensor();
    router.shared_inner = inner.tensor(), router.shared_y = apart.tensor();
    REQUIRE(backend->Router(router).ok());
    REQUIRE(backend->Moe({x.tensor(), experts.view, ids.data(), weights.data(), kTopK, apart.tensor(), true})
                .ok());

    REQUIRE(backend->Gemm({x.tensor(), w.tensor(), scores.tensor()}).ok());
    REQUIRE(backend->Gemm({x.tensor(), gate_up.tensor(), inner.tensor()}).ok());
    REQUIRE(backend->SiluMul({inner.tensor(), activated.tensor()}).ok());
    MoeArgs moe{x.tensor(), experts.view, nullptr, nullptr, kTopK, together.tensor()};
    moe.choice = {scores.tensor(), bias.row(0), true, 2.5f, &row_count, chosen.data(), chosen_weights.data()};
    moe.shared_inner = activated.tensor(), moe.shared_down = down.tensor();
    REQUIRE(backend->Moe(moe).ok());
    CHECK(chosen == ids);
    CHECK(chosen_weights == weights);
    CHECK(SameBits(apart, together));
  }
}

}  // namespace
}  // namespace kdt::kernels::test
