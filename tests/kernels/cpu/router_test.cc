#include "kdt/kernels/router.h"

#include <algorithm>
#include <numeric>

#include "tests/kernels/cpu/util.h"

namespace kdt::kernels::test {
namespace {

TEST_CASE("router picks by biased scores and weighs by unbiased ones", "[router]") {
  std::mt19937 rng(13);
  const auto backend = MakeBackend(2);
  for (const int64_t experts : {int64_t{16}, int64_t{13}, int64_t{384}}) {
    for (const bool f32_weights : {false, true}) {
      constexpr int64_t kRows = 9, kHidden = 70, kTopK = 4;
      Matrix x(kRows, kHidden, 1), w32(experts, kHidden), bias(1, experts);
      Bf16Matrix w16(experts, kHidden);
      x.Fill(rng);
      w16.Fill(rng, 0.2f);
      bias.Fill(rng, 0.1f);
      for (int64_t e = 0; e < experts; ++e) {
        for (int64_t i = 0; i < kHidden; ++i) w32.at(e, i) = w16.at(e, i);
      }
      std::vector<int32_t> ids(kRows * kTopK);
      std::vector<float> weights(kRows * kTopK);
      const Tensor w = f32_weights ? w32.tensor() : w16.tensor();
      REQUIRE(backend->Router({x.tensor(), w, bias.row(0), kTopK, true, 2.827f, ids.data(), weights.data()})
                  .ok());
      for (int64_t r = 0; r < kRows; ++r) {
        std::vector<double> score(experts);
        for (int64_t e = 0; e < experts; ++e) {
          double sum = 0;
          for (int64_t i = 0; i < kHidden; ++i) sum += static_cast<double>(x.at(r, i)) * w16.at(e, i);
          score[e] = 1 / (1 + std::exp(-sum));
        }
        std::vector<int32_t> order(experts);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
          return score[a] + bias.at(0, a) > score[b] + bias.at(0, b);
        });
        order.resize(kTopK);
        std::sort(order.begin(), order.end());
        double sum = 0;
        for (const int32_t e : order) sum += score[e];
        for (int64_t k = 0; k < kTopK; ++k) {
          REQUIRE(ids[r * kTopK + k] == order[k]);
          CHECK(weights[r * kTopK + k] == Catch::Approx(score[order[k]] / sum * 2.827).epsilon(1e-5));
        }
      }
    }
  }
}

TEST_CASE("router ties go to lower indices, NaN rows still name experts", "[router]") {
  constexpr int64_t kExperts = 8, kHidden = 32;
  Matrix x(2, kHidden), bias(1, kExperts);
  std::fill(x.row(0), x.row(0) + kHidden, 0.0f);
  std::fill(x.row(1), x.row(1) + kHidden, NAN);
  std::fill(bias.row(0), bias.row(0) + kExperts, 0.0f);
  Bf16Matrix w(kExperts, kHidden);
  int32_t ids[6];
  float weights[6];
  REQUIRE(MakeBackend()->Router({x.tensor(), w.tensor(), bias.row(0), 3, false, 2.0f, ids, weights}).ok());
  for (int k = 0; k < 3; ++k) {
    CHECK(ids[k] == k);
    CHECK(weights[k] == 1.0f);  // sigmoid(0) * 2, not normalised
    CHECK(ids[3 + k] == k);
    CHECK(std::isnan(weights[3 + k]));
  }
}

TEST_CASE("router gives padding rows no expert", "[router]") {
  std::mt19937 rng(14);
  constexpr int64_t kRows = 5, kExperts = 8, kHidden = 32, kTopK = 2;
  Matrix x(kRows, kHidden), bias(1, kExperts);
  Bf16Matrix w(kExperts, kHidden);
  x.Fill(rng);
  bias.Fill(rng, 0.1f);
  w.Fill(rng, 0.2f);
  const auto backend = MakeBackend(2);
  std::vector<int32_t> all_ids(kRows * kTopK), ids(kRows * kTopK, 77);
  std::vector<float> all_weights(kRows * kTopK), weights(kRows * kTopK, 77);
  REQUIRE(
      backend
          ->Router({x.tensor(), w.tensor(), bias.row(0), kTopK, true, 1, all_ids.data(), all_weights.data()})
          .ok());
  const int32_t row_count = 3;
  REQUIRE(backend
              ->Router({x.tensor(), w.tensor(), bias.row(0), kTopK, true, 1, ids.data(), weights.data(),
                        &row_count})
              .ok());
  for (int64_t i = 0; i < kRows * kTopK; ++i) {
    CHECK(ids[i] == (i < row_count * kTopK ? all_ids[i] : -1));
    CHECK(weights[i] == (i < row_count * kTopK ? all_weights[i] : 0.0f));
  }
}

TEST_CASE("shared experts in the router's op have the bits of gemm, silu_mul and gemm", "[router][bits]") {
  std::mt19937 rng(21);
  const auto backend = MakeBackend(2);
  Matrix x(5, 96), bias(1, 16), inner(5, 48), activated(5, 24), apart(5, 40), shared(5, 40);
  Bf16Matrix w(16, 96), gate_up(48, 96), down(40, 24);
  x.Fill(rng);
  bias.Fill(rng);
  w.Fill(rng, 0.2f);
  gate_up.Fill(rng);
  down.Fill(rng);
  std::vector<int32_t> ids(5 * 4), ids_shared(5 * 4);
  std::vector<float> weights(5 * 4), weights_shared(5 * 4);
  RouterArgs args{x.tensor(), w.tensor(), bias.row(0), 4, true, 2.0f, ids.data(), weights.data()};
  REQUIRE(backend->Router(args).ok());
  REQUIRE(backend->Gemm({x.tensor(), gate_up.tensor(), inner.tensor()}).ok());
  REQUIRE(backend->SiluMul({inner.tensor(), activated.tensor()}).ok());
  REQUIRE(backend->Gemm({activated.tensor(), down.tensor(), apart.tensor()}).ok());
  args.expert_ids = ids_shared.data(), args.weights = weights_shared.data();
  args.shared_gate_up = gate_up.tensor(), args.shared_down = down.tensor();
  args.shared_inner = inner.tensor(), args.shared_y = shared.tensor();
  REQUIRE(backend->Router(args).ok());
  CHECK(ids == ids_shared);
  CHECK(weights == weights_shared);
  CHECK(SameBits(apart, shared));
}

}  // namespace
}  // namespace kdt::kernels::test
