#include "kdt/kernels/logits.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "common/rng.h"
#include "tests/kernels/cpu/util.h"

namespace kdt::kernels::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct TopK {
  TopK(int64_t rows, int64_t k_in)
      : k(k_in), max(rows), sum_exp(rows), bad(rows), ids(rows * k_in), values(rows * k_in) {}
  LogitsTopKArgs Args(Tensor logits, int64_t vocab_begin) {
    return {logits, vocab_begin, k, max.data(), sum_exp.data(), bad.data(), ids.data(), values.data()};
  }
  int64_t k;
  std::vector<float> max, sum_exp;
  std::vector<uint8_t> bad;
  std::vector<int32_t> ids;
  std::vector<float> values;
};

TEST_CASE("top-k, maximum and sum of exponentials agree with a sort in float64", "[logits]") {
  std::mt19937 rng(17);
  const auto backend = MakeBackend(2);
  for (const int64_t vocab : {1, 15, 64, 100, 4096}) {
    for (const int64_t k : {int64_t{0}, int64_t{1}, std::min<int64_t>(64, vocab)}) {
      Matrix logits(5, vocab, 3);
      logits.Fill(rng, 4.0f);
      // Many equal values: ties by lower id.
      for (int64_t c = 0; c < vocab; ++c)
        logits.at(1, c) = static_cast<float>(static_cast<int>(logits.at(1, c)));
      std::fill(logits.row(2), logits.row(2) + vocab, 3.0f);
      TopK top(5, k);
      REQUIRE(backend->LogitsTopK(top.Args(logits.tensor(), 1000)).ok());
      for (int64_t r = 0; r < 5; ++r) {
        std::vector<int32_t> order(vocab);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](int32_t a, int32_t b) { return logits.at(r, a) > logits.at(r, b); });
        double sum = 0;
        for (int64_t c = 0; c < vocab; ++c)
          sum += std::exp(static_cast<double>(logits.at(r, c)) - logits.at(r, order[0]));
        CHECK(top.bad[r] == 0);
        CHECK(top.max[r] == logits.at(r, order[0]));
        CHECK(top.sum_exp[r] == Catch::Approx(sum).epsilon(2e-6));
        for (int64_t i = 0; i < k; ++i) {
          REQUIRE(top.ids[r * k + i] == 1000 + order[i]);
          REQUIRE(top.values[r * k + i] == logits.at(r, order[i]));
        }
      }
    }
  }
}

TEST_CASE("a logit that is not finite marks its row as bad, wherever it stands", "[logits]") {
  std::mt19937 rng(18);
  for (const float value : {NAN, kInfinity, -kInfinity}) {
    for (const int64_t at : {0, 17, 99}) {
      Matrix logits(3, 100);
      logits.Fill(rng);
      logits.at(1, at) = value;
      TopK top(3, 4);
      REQUIRE(MakeBackend()->LogitsTopK(top.Args(logits.tensor(), 0)).ok());
      CHECK(top.bad == std::vector<uint8_t>{0, 1, 0});
      for (int i = 0; i < 4; ++i) CHECK(std::isfinite(top.values[2 * 4 + i]));
    }
  }
  Matrix all(1, 40);
  std::fill(all.row(0), all.row(0) + 40, NAN);
  TopK top(1, 2);
  REQUIRE(MakeBackend()->LogitsTopK(top.Args(all.tensor(), 0)).ok());
  CHECK(top.bad[0] == 1);
  CHECK(top.ids == std::vector<int32_t>{-1, -1});
}

struct Draw {
  explicit Draw(int64_t rows) : temperature(rows), seed(rows), position(rows), id(rows), value(rows) {}
  GumbelArgmaxArgs Args(Tensor logits, int64_t vocab_begin) {
    return {logits, vocab_begin, temperature.data(), seed.data(), position.data(), id.data(), value.data()};
  }
  std::vector<float> temperature;
  std::vector<uint64_t> seed;
  std::vector<int64_t> position;
  std::vector<int32_t> id;
  std::vector<float> value;
};

TEST_CASE("gumbel_argmax gives the bits of the scalar definition", "[gumbel]") {
  std::mt19937 rng(19);
  for (const int64_t vocab_begin : {0, 4, 513, 163838}) {
    for (const int64_t vocab : {1, 5, 64, 515}) {
      constexpr int64_t kRows = 24;
      Matrix logits(kRows, vocab, 1);
      logits.Fill(rng, 3.0f);
      Draw draw(kRows);
      for (int64_t r = 0; r < kRows; ++r) {
        draw.temperature[r] = r % 4 == 0 ? 0.0f : 0.3f * static_cast<float>(r % 7 + 1);
        draw.seed[r] = (static_cast<uint64_t>(rng()) << 32) | rng();
        draw.position[r] = r % 5 == 0 ? (int64_t{1} << 33) + r : r * 1000;
        if (r % 3 == 0) logits.at(r, 0) = -kInfinity;
        if (r % 6 == 0) logits.at(r, vocab - 1) = NAN;
      }
      REQUIRE(MakeBackend(2)->GumbelArgmax(draw.Args(logits.tensor(), vocab_begin)).ok());
      for (int64_t r = 0; r < kRows; ++r) {
        int64_t best_id = -1;
        float best = -kInfinity;
        for (int64_t c = 0; c < vocab; ++c) {
          float value = logits.at(r, c);
          if (!(value > -kInfinity)) continue;
          if (draw.temperature[r] > 0) {
            value = value * (1.0f / draw.temperature[r]);
            value =
                value + GumbelNoise(draw.seed[r], draw.position[r], static_cast<uint32_t>(vocab_begin + c));
          }
          if (value > best) {
            best = value;
            best_id = vocab_begin + c;
          }
        }
        REQUIRE(draw.id[r] == best_id);
        REQUIRE(SameBits(&draw.value[r], &best, 1));
      }
    }
  }
}

TEST_CASE("gumbel_argmax: ties, masks and rows without a candidate", "[gumbel]") {
  Matrix logits(3, 50);
  std::fill(logits.row(0), logits.row(0) + 50, 2.0f);
  std::fill(logits.row(1), logits.row(1) + 50, -kInfinity);
  std::fill(logits.row(2), logits.row(2) + 50, -kInfinity);
  logits.at(2, 37) = -1000.0f;
  Draw draw(3);
  draw.temperature = {0.0f, 1.0f, 1.0f};
  REQUIRE(MakeBackend()->GumbelArgmax(draw.Args(logits.tensor(), 100)).ok());
  CHECK(draw.id == std::vector<int32_t>{100, -1, 137});
}

TEST_CASE("gumbel_argmax says which rows hold a logit that is not finite", "[gumbel]") {
  for (const int64_t vocab : {3, 64, 515}) {
    for (const int64_t at : {int64_t{0}, vocab / 2, vocab - 1}) {
      Matrix logits(4, vocab, 1);
      for (int64_t r = 0; r < 4; ++r) std::fill(logits.row(r), logits.row(r) + vocab, 1.0f);
      logits.at(1, at) = NAN;
      logits.at(2, at) = kInfinity;
      logits.at(3, at) = -kInfinity;
      Draw draw(4);
      draw.temperature = {0.0f, 1.0f, 0.0f, 1.0f};
      std::vector<int32_t> bad(4, 9);
      GumbelArgmaxArgs args = draw.Args(logits.tensor(), 5);
      args.bad = bad.data();
      REQUIRE(MakeBackend()->GumbelArgmax(args).ok());
      CHECK(bad == std::vector<int32_t>{0, 1, 1, 1});
    }
  }
}

TEST_CASE("scale_rows multiplies the rows that have a factor", "[scale_rows]") {
  std::mt19937 rng(23);
  Matrix x(3, 37, 2);
  x.Fill(rng);
  const Matrix before = x;
  const float factor[] = {0.7f, 1.0f, 3.0f};
  REQUIRE(MakeBackend(2)->ScaleRows({x.tensor(), factor}).ok());
  for (int64_t r = 0; r < 3; ++r) {
    for (int64_t c = 0; c < 37; ++c) CHECK(x.at(r, c) == before.at(r, c) * factor[r]);
  }
  CHECK(x.GapsUntouched());
}

TEST_CASE("gumbel_argmax draws from the softmax", "[gumbel]") {
  constexpr int64_t kRows = 4000;
  const double probability[] = {0.5, 0.3, 0.15, 0.05};
  Matrix logits(kRows, 4);
  Draw draw(kRows);
  for (int64_t r = 0; r < kRows; ++r) {
    for (int c = 0; c < 4; ++c) logits.at(r, c) = 2.0f * static_cast<float>(std::log(probability[c]));
    draw.temperature[r] = 2.0f;
    draw.seed[r] = 7;
    draw.position[r] = r;
  }
  REQUIRE(MakeBackend()->GumbelArgmax(draw.Args(logits.tensor(), 0)).ok());
  double counts[4] = {};
  for (const int32_t id : draw.id) counts[id] += 1.0 / kRows;
  for (int c = 0; c < 4; ++c) CHECK(counts[c] == Catch::Approx(probability[c]).margin(0.03));
}

}  // namespace
}  // namespace kdt::kernels::test
