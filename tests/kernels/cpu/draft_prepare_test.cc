#include "tests/kernels/cpu/util.h"

namespace kdt::kernels::test {
namespace {

TEST_CASE("draft_prepare gives the bits of norm, rope and write, layer by layer", "[draft_prepare]") {
  std::mt19937 rng(32);
  constexpr int64_t kHeads = 4, kKvHeads = 2, kDim = 24, kLayers = 3, kRows = 5, kSlots = 8;
  constexpr int64_t kWidth = kKvHeads * kDim;
  const auto backend = MakeBackend(2);
  Bf16Matrix q_norm(1, kDim), k_norm(kLayers, kDim);
  q_norm.Fill(rng);
  k_norm.Fill(rng);
  const uint16_t* k_norms[kLayers];
  for (int64_t l = 0; l < kLayers; ++l) k_norms[l] = k_norm.bits.data() + l * kDim;
  float inv_freq[kDim / 2];
  for (int i = 0; i < kDim / 2; ++i) inv_freq[i] = std::pow(10000.0f, -2.0f * static_cast<float>(i) / kDim);
  const int32_t positions[kRows] = {0, 3, 70000, 12, 5}, slots[kRows] = {7, 2, -1, 0, 4};
  const auto turn = [&](const Tensor& x, int64_t heads, const uint16_t* weight) {
    for (int64_t h = 0; h < heads; ++h) {
      const Tensor head = x.Columns(h * kDim, kDim);
      REQUIRE(backend->RmsNorm({head, {}, weight, 1e-5f, head}).ok());
    }
    REQUIRE(
        backend->Rope({x, heads, kDim, 0, kDim, positions, inv_freq, 1.25f, RopeLayout::kHalfSplit}).ok());
  };

  SECTION("a block: queries, and the keys of one layer where they are") {
    Matrix q(kRows, kHeads * kDim, 2), kv(kRows, 2 * kWidth, 3);
    q.Fill(rng);
    kv.Fill(rng);
    Matrix expected_q = q, expected_kv = kv;
    turn(expected_q.tensor(), kHeads, q_norm.bits.data());
    turn(expected_kv.tensor().Columns(0, kWidth), kKvHeads, k_norms[1]);
    REQUIRE(backend
                ->DraftPrepare({q.tensor(), kv.tensor(), kHeads, kKvHeads, kDim, 1, q_norm.bits.data(),
                                &k_norms[1], 1e-5f, positions, inv_freq, 1.25f})
                .ok());
    CHECK(SameBits(q, expected_q));
    CHECK(SameBits(kv, expected_kv));
    CHECK(q.GapsUntouched());
    CHECK(kv.GapsUntouched());
  }

  SECTION("context: all layers' keys and values into their pools") {
    constexpr int64_t kStride = kSlots * 2 * kWidth + 16;
    Matrix kv(kRows, kLayers * 2 * kWidth, 3), pools(1, kLayers * kStride);
    kv.Fill(rng);
    pools.Fill(rng);
    Matrix steps = kv, expected = pools;
    for (int64_t l = 0; l < kLayers; ++l) {
      turn(steps.tensor().Columns(l * 2 * kWidth, kWidth), kKvHeads, k_norms[l]);
      const Tensor pool = MakeTensor(expected.row(0) + l * kStride, DType::kF32, kSlots, 2 * kWidth);
      REQUIRE(backend->KvWrite({steps.tensor().Columns(l * 2 * kWidth, 2 * kWidth), slots, pool}).ok());
    }
    REQUIRE(backend
                ->DraftPrepare({{},
                                kv.tensor(),
                                kHeads,
                                kKvHeads,
                                kDim,
                                kLayers,
                                nullptr,
                                k_norms,
                                1e-5f,
                                positions,
                                inv_freq,
                                1.25f,
                                slots,
                                MakeTensor(pools.row(0), DType::kF32, kSlots, 2 * kWidth),
                                kStride})
                .ok());
    CHECK(SameBits(pools, expected));
    CHECK(kv.GapsUntouched());
  }
}

}  // namespace
}  // namespace kdt::kernels::test
