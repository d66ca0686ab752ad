#include "kdt/kernels/draft_attention.h"

#include <algorithm>
#include <numeric>

#include "tests/kernels/cpu/util.h"

namespace kdt::kernels::test {
namespace {

struct Case {
  Case(std::vector<int32_t> lengths, std::vector<int32_t> windows, int64_t heads_in, int64_t kv_heads_in,
       int64_t dim_in, int64_t block_in, DType dtype_in, std::mt19937& rng)
      : heads(heads_in),
        kv_heads(kv_heads_in),
        dim(dim_in),
        block(block_in),
        dtype(dtype_in),
        context(std::move(lengths)),
        window(std::move(windows)),
        q(Rows(), heads * dim, 1),
        k(Rows(), kv_heads * dim, 2),
        v(Rows(), kv_heads * dim, 3),
        pool(std::accumulate(context.begin(), context.end(), 1), 2 * kv_heads * dim),
        stride(*std::max_element(context.begin(), context.end()) + 1),
        table(context.size() * stride, -1) {
    q.Fill(rng);
    k.Fill(rng);
    v.Fill(rng);
    pool.Fill(rng);
    std::vector<int32_t> slots(pool.rows);
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), rng);
    size_t next = 0;
    for (size_t s = 0; s < context.size(); ++s) {
      for (int32_t p = 0; p < context[s]; ++p) table[s * stride + p] = slots[next++];
    }
    for (float& value : pool.values) {
      narrow.push_back(FloatToBf16(value));
      if (dtype == DType::kBF16) value = Bf16ToFloat(narrow.back());
    }
  }

  int64_t Rows() const { return static_cast<int64_t>(context.size()) * block; }

  Matrix Run(Backend& backend, int64_t first = 0, int64_t count = -1) {
    if (count < 0) count = static_cast<int64_t>(context.size());
    Matrix out(count * block, heads * dim, 2);
    const Tensor pool_view =
        dtype == DType::kF32 ? pool.tensor() : MakeTensor(narrow.data(), dtype, pool.rows, pool.cols);
    const int64_t row = first * block, rows = count * block;
    REQUIRE(
        backend
            .DraftAttention({q.tensor().Rows(row, rows), k.tensor().Rows(row, rows),
                             v.tensor().Rows(row, rows), pool_view, heads, kv_heads, dim, block, 0.3f, count,
                             &context[first], &window[first], &table[first * stride], stride, out.tensor()})
            .ok());
    CHECK(out.GapsUntouched());
    return out;
  }

  double WorstError(const Matrix& out) const {
    double worst = 0;
    for (int64_t row = 0; row < Rows(); ++row) {
      const int64_t s = row / block;
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t kv = h / (heads / kv_heads);
        std::vector<const float*> keys, values;
        for (int32_t p = window[s]; p < context[s]; ++p) {
          keys.push_back(pool.row(table[s * stride + p]) + kv * dim);
          values.push_back(pool.row(table[s * stride + p]) + (kv_heads + kv) * dim);
        }
        for (int64_t i = 0; i < block; ++i) {
          keys.push_back(k.row(s * block + i) + kv * dim);
          values.push_back(v.row(s * block + i) + kv * dim);
        }
        std::vector<double> p;
        for (const float* key : keys) {
          double dot = 0;
          for (int64_t d = 0; d < dim; ++d) dot += static_cast<double>(q.at(row, h * dim + d)) * key[d];
          p.push_back(dot * 0.3f);
        }
        const double max = *std::max_element(p.begin(), p.end());
        double sum = 0;
        for (double& value : p) sum += value = std::exp(value - max);
        for (int64_t d = 0; d < dim; ++d) {
          double expected = 0;
          for (size_t i = 0; i < p.size(); ++i) expected += p[i] / sum * values[i][d];
          worst = std::max(worst, std::abs(out.at(row, h * dim + d) - expected));
        }
      }
    }
    return worst;
  }

  int64_t heads, kv_heads, dim, block;
  DType dtype;
  std::vector<int32_t> context, window;
  Matrix q, k, v, pool;
  int64_t stride;
  std::vector<int32_t> table;
  std::vector<uint16_t> narrow;
};

TEST_CASE("draft_attention agrees with float64: ragged contexts, windows, grouped heads",
          "[draft_attention]") {
  std::mt19937 rng(25);
  const auto backend = MakeBackend(2);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Case grouped({0, 1, 130, 64, 300}, {0, 0, 0, 64, 200}, 8, 2, 32, 8, dtype, rng);
    CHECK(grouped.WorstError(grouped.Run(*backend)) < 2e-6);
    Case odd({70}, {3}, 3, 3, 21, 5, dtype, rng);
    CHECK(odd.WorstError(odd.Run(*backend)) < 2e-6);
    Case many({90}, {0}, 40, 1, 16, 4, dtype, rng);  // more queries than share a block
    CHECK(many.WorstError(many.Run(*backend)) < 2e-6);
  }
}

TEST_CASE("draft_attention: a sequence has the same bits alone and in a batch", "[draft_attention][bits]") {
  std::mt19937 rng(26);
  Case c({10, 200, 64}, {0, 7, 0}, 8, 4, 32, 8, DType::kF32, rng);
  const auto single = MakeBackend(1);
  const Matrix together = c.Run(*single);
  for (const int threads : {2, 3}) CHECK(SameBits(together, c.Run(*MakeBackend(threads))));
  for (int64_t s = 0; s < 3; ++s) {
    const Matrix alone = c.Run(*single, s, 1);
    for (int64_t i = 0; i < c.block; ++i)
      CHECK(SameBits(alone.row(i), together.row(s * c.block + i), alone.cols));
  }
}

}  // namespace
}  // namespace kdt::kernels::test
