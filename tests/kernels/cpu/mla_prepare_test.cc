#include "tests/kernels/cpu/util.h"

namespace kdt::kernels::test {
namespace {

TEST_CASE("mla_prepare gives the bits of norm, norm, rope and write", "[mla_prepare]") {
  std::mt19937 rng(31);
  for (const int64_t q_lora : {24, 192}) {
    constexpr int64_t kLatent = 40, kRope = 10, kRows = 5;
    Matrix qkv(kRows, q_lora + kLatent + kRope, 3), pool(8, kLatent + kRope);
    qkv.Fill(rng);
    pool.Fill(rng);
    Bf16Matrix q_norm(1, q_lora), kv_norm(1, kLatent);
    q_norm.Fill(rng);
    kv_norm.Fill(rng);
    float inv_freq[kRope / 2];
    for (int i = 0; i < kRope / 2; ++i)
      inv_freq[i] = std::pow(10000.0f, -2.0f * static_cast<float>(i) / kRope);
    const int32_t positions[kRows] = {0, 3, 70000, 12, 5}, slots[kRows] = {7, 2, -1, 0, 4};
    const auto backend = MakeBackend(2);

    Matrix steps = qkv, steps_pool = pool;
    const Tensor q = steps.tensor().Columns(0, q_lora), latent = steps.tensor().Columns(q_lora, kLatent);
    REQUIRE(backend->RmsNorm({q, {}, q_norm.bits.data(), 1e-6f, q}).ok());
    REQUIRE(backend->RmsNorm({latent, {}, kv_norm.bits.data(), 1e-6f, latent}).ok());
    REQUIRE(backend
                ->Rope({steps.tensor().Columns(q_lora + kLatent, kRope), 1, kRope, 0, kRope, positions,
                        inv_freq, 1.25f, RopeLayout::kInterleaved})
                .ok());
    REQUIRE(
        backend->KvWrite({steps.tensor().Columns(q_lora, kLatent + kRope), slots, steps_pool.tensor()}).ok());

    REQUIRE(backend
                ->MlaPrepare({qkv.tensor(), q_lora, kLatent, kRope, q_norm.bits.data(), kv_norm.bits.data(),
                              1e-6f, positions, inv_freq, 1.25f, slots, pool.tensor()})
                .ok());
    CHECK(SameBits(pool, steps_pool));
    for (int64_t r = 0; r < kRows; ++r) CHECK(SameBits(qkv.row(r), steps.row(r), q_lora));
    CHECK(qkv.GapsUntouched());
  }
}

}  // namespace
}  // namespace kdt::kernels::test
