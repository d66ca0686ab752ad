#include "kdt/kernels/mla_absorb.h"

#include "tests/kernels/cpu/util.h"

namespace kdt::kernels::test {
namespace {

struct Shape {
  int64_t rows, heads, nope, rope, v, latent;
};

AbsorbQueryArgs QueryArgs(const Shape& s, Tensor q, const Bf16Matrix& w, Tensor out) {
  return {q, w.bits.data(), s.heads, s.nope, s.rope, s.v, s.latent, out};
}

AbsorbValueArgs ValueArgs(const Shape& s, Tensor attended, const Bf16Matrix& w, Tensor out) {
  return {attended, w.bits.data(), s.heads, s.nope, s.v, s.latent, out};
}

TEST_CASE("absorbed projections agree with float64", "[mla_absorb]") {
  std::mt19937 rng(4);
  const auto backend = MakeBackend(2);
  for (const Shape& s : {Shape{1, 8, 32, 64, 32, 512}, Shape{9, 2, 7, 6, 5, 40},
                         Shape{64, 1, 32, 64, 32, 512}, Shape{5, 3, 128, 64, 128, 130}}) {
    Matrix q(s.rows, s.heads * (s.nope + s.rope)), q_out(s.rows, s.heads * (s.latent + s.rope), 2);
    Matrix attended(s.rows, s.heads * s.latent), out(s.rows, s.heads * s.v, 3);
    Bf16Matrix w(s.heads * (s.nope + s.v), s.latent);
    q.Fill(rng);
    attended.Fill(rng);
    w.Fill(rng);
    REQUIRE(backend->AbsorbQuery(QueryArgs(s, q.tensor(), w, q_out.tensor())).ok());
    REQUIRE(backend->AbsorbValue(ValueArgs(s, attended.tensor(), w, out.tensor())).ok());
    double worst = 0;
    bool rope_copied = true;
    for (int64_t r = 0; r < s.rows; ++r) {
      for (int64_t h = 0; h < s.heads; ++h) {
        const float* query = q.row(r) + h * (s.nope + s.rope);
        const float* query_out = q_out.row(r) + h * (s.latent + s.rope);
        for (int64_t c = 0; c < s.latent; ++c) {
          double sum = 0, size = 1e-30;
          for (int64_t i = 0; i < s.nope; ++i) {
            const double term = static_cast<double>(query[i]) * w.at(h * (s.nope + s.v) + i, c);
            sum += term;
            size += std::abs(term);
          }
          worst = std::max(worst, std::abs(query_out[c] - sum) / size);
        }
        rope_copied = rope_copied && SameBits(query + s.nope, query_out + s.latent, s.rope);
        for (int64_t o = 0; o < s.v; ++o) {
          double sum = 0, size = 1e-30;
          for (int64_t c = 0; c < s.latent; ++c) {
            const double term = static_cast<double>(attended.at(r, h * s.latent + c)) *
                                w.at(h * (s.nope + s.v) + s.nope + o, c);
            sum += term;
            size += std::abs(term);
          }
          worst = std::max(worst, std::abs(out.at(r, h * s.v + o) - sum) / size);
        }
      }
    }
    CHECK(worst < 1e-6);
    CHECK(rope_copied);
    CHECK(q_out.GapsUntouched());
    CHECK(out.GapsUntouched());
  }
}

TEST_CASE("absorbed rows have the same bits alone and in a batch", "[mla_absorb][bits]") {
  std::mt19937 rng(5);
  const Shape s{65, 3, 32, 64, 32, 512};
  Matrix q(s.rows, s.heads * (s.nope + s.rope)), attended(s.rows, s.heads * s.latent);
  Matrix q_alone(s.rows, s.heads * (s.latent + s.rope)), alone(s.rows, s.heads * s.v);
  Bf16Matrix w(s.heads * (s.nope + s.v), s.latent);
  q.Fill(rng);
  attended.Fill(rng);
  w.Fill(rng);
  const auto single = MakeBackend(1);
  for (int64_t r = 0; r < s.rows; ++r) {
    REQUIRE(single->AbsorbQuery(QueryArgs(s, q.tensor().Rows(r, 1), w, q_alone.tensor().Rows(r, 1))).ok());
    REQUIRE(
        single->AbsorbValue(ValueArgs(s, attended.tensor().Rows(r, 1), w, alone.tensor().Rows(r, 1))).ok());
  }
  for (const int threads : {1, 2, 3}) {
    const auto backend = MakeBackend(threads);
    Matrix q_out(s.rows, s.heads * (s.latent + s.rope)), out(s.rows, s.heads * s.v);
    REQUIRE(backend->AbsorbQuery(QueryArgs(s, q.tensor(), w, q_out.tensor())).ok());
    REQUIRE(backend->AbsorbValue(ValueArgs(s, attended.tensor(), w, out.tensor())).ok());
    CHECK(SameBits(q_out, q_alone));
    CHECK(SameBits(out, alone));
  }
}

TEST_CASE("absorbed query rotates to the bits of rope before it", "[mla_absorb][bits]") {
  std::mt19937 rng(6);
  const Shape s{7, 3, 32, 64, 32, 512};
  const auto backend = MakeBackend(2);
  Matrix q(s.rows, s.heads * (s.nope + s.rope));
  Matrix separate(s.rows, s.heads * (s.latent + s.rope)), fused(s.rows, s.heads * (s.latent + s.rope));
  Bf16Matrix w(s.heads * (s.nope + s.v), s.latent);
  q.Fill(rng);
  w.Fill(rng);
  const std::vector<int32_t> positions = {0, 1, 5, 77, 4096, 131071, 262143};
  std::vector<float> inv_freq(s.rope / 2);
  for (size_t i = 0; i < inv_freq.size(); ++i)
    inv_freq[i] = std::pow(50000.0f, -2.0f * static_cast<float>(i) / static_cast<float>(s.rope));
  AbsorbQueryArgs args = QueryArgs(s, q.tensor(), w, fused.tensor());
  args.positions = positions.data();
  args.inv_freq = inv_freq.data();
  args.attention_factor = 1.25f;
  REQUIRE(backend->AbsorbQuery(args).ok());
  REQUIRE(backend
              ->Rope({q.tensor(), s.heads, s.nope + s.rope, s.nope, s.rope, positions.data(), inv_freq.data(),
                      1.25f, RopeLayout::kInterleaved})
              .ok());
  REQUIRE(backend->AbsorbQuery(QueryArgs(s, q.tensor(), w, separate.tensor())).ok());
  CHECK(SameBits(fused, separate));
  CHECK(fused.GapsUntouched());
}

TEST_CASE("mla_query gives the bits of mla_prepare, gemm and absorb_query", "[mla_query]") {
  constexpr int64_t kRows = 5, kHeads = 3, kQLora = 48, kLatentWidth = 40, kNopeWidth = 16, kRopeWidth = 10,
                    kV = 8;
  std::mt19937 rng(17);
  Matrix qkv(kRows, kQLora + kLatentWidth + kRopeWidth), pool(8, kLatentWidth + kRopeWidth);
  Matrix q(kRows, kHeads * (kNopeWidth + kRopeWidth)), out(kRows, kHeads * (kLatentWidth + kRopeWidth));
  qkv.Fill(rng);
  pool.Fill(rng);
  Bf16Matrix q_norm(1, kQLora), kv_norm(1, kLatentWidth), w_q_b(kHeads * (kNopeWidth + kRopeWidth), kQLora),
      w_kv_b(kHeads * (kNopeWidth + kV), kLatentWidth);
  for (Bf16Matrix* m : {&q_norm, &kv_norm, &w_q_b, &w_kv_b}) m->Fill(rng);
  float inv_freq[kRopeWidth / 2];
  for (int i = 0; i < kRopeWidth / 2; ++i)
    inv_freq[i] = std::pow(10000.0f, -2.0f * static_cast<float>(i) / kRopeWidth);
  const int32_t positions[kRows] = {0, 3, 70000, 12, 5}, slots[kRows] = {7, 2, -1, 0, 4};
  const auto backend = MakeBackend(2);

  Matrix steps_qkv = qkv, steps_pool = pool, steps_q = q, steps_out = out;
  const auto args = [&](Matrix& from, Matrix& keys, Matrix& between, Matrix& to) {
    return MlaQueryArgs{{from.tensor(), kQLora, kLatentWidth, kRopeWidth, q_norm.bits.data(),
                         kv_norm.bits.data(), 1e-6f, positions, inv_freq, 1.25f, slots, keys.tensor()},
                        w_q_b.tensor(),
                        {between.tensor(), w_kv_b.bits.data(), kHeads, kNopeWidth, kRopeWidth, kV,
                         kLatentWidth, to.tensor(), positions, inv_freq, 1.25f}};
  };
  const MlaQueryArgs steps = args(steps_qkv, steps_pool, steps_q, steps_out);
  REQUIRE(backend->MlaPrepare(steps.prepare).ok());
  REQUIRE(backend->Gemm({steps.prepare.qkv.Columns(0, kQLora), steps.w_q_b, steps.absorb.q}).ok());
  REQUIRE(backend->AbsorbQuery(steps.absorb).ok());
  REQUIRE(backend->MlaQuery(args(qkv, pool, q, out)).ok());
  CHECK(SameBits(out, steps_out));
  CHECK(SameBits(pool, steps_pool));
}

}  // namespace
}  // namespace kdt::kernels::test
