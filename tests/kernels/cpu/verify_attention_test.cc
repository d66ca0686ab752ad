#include "kdt/kernels/verify_attention.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "tests/kernels/cpu/util.h"

namespace kdt::kernels::test {
namespace {

struct Dims {
  int64_t heads, latent, rope;
  int64_t width() const { return latent + rope; }
};

// One sequence: committed tokens, then the rows of a chain or of a random tree.
struct Sequence {
  int64_t context = 0;
  bool causal = false;
  std::vector<int> parents;    // of the rows; the chain's are i - 1
  std::vector<int32_t> slots;  // context + rows
};

// A pool and a batch of sequences over it, slots in random order.
struct Case {
  Case(const Dims& dims_in, std::vector<Sequence> sequences_in, std::mt19937& rng, float scale_in = 0.2f,
       DType dtype = DType::kF32)
      : dims(dims_in),
        scale(scale_in),
        pool_dtype(dtype),
        sequences(std::move(sequences_in)),
        pool(0, 0),
        q(0, 0) {
    int64_t slots = 0, rows = 0, stride = 1;
    for (const Sequence& s : sequences) {
      const int64_t size = s.context + static_cast<int64_t>(s.parents.size());
      slots += size;
      rows += static_cast<int64_t>(s.parents.size());
      stride = std::max(stride, size);
    }
    std::vector<int32_t> order(slots + 5);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    pool = Matrix(slots + 5, dims.width(), 4);
    pool.Fill(rng);
    q = Matrix(rows, dims.heads * dims.width(), 2);
    q.Fill(rng);
    size_t next = 0;
    row_begin.push_back(0);
    table.assign(sequences.size() * stride, -1);
    table_stride = stride;
    for (size_t s = 0; s < sequences.size(); ++s) {
      Sequence& sequence = sequences[s];
      const size_t size = sequence.context + sequence.parents.size();
      sequence.slots.assign(order.begin() + next, order.begin() + next + size);
      std::copy(sequence.slots.begin(), sequence.slots.end(), table.begin() + s * stride);
      next += size;
      row_begin.push_back(row_begin.back() + static_cast<int32_t>(sequence.parents.size()));
      context.push_back(static_cast<int32_t>(sequence.context));
      causal.push_back(sequence.causal);
      for (size_t i = 0; i < sequence.parents.size(); ++i) {
        std::vector<uint64_t> row(kAncestorWords, sequence.causal ? ~uint64_t{0} : 0);
        if (!sequence.causal) {
          for (int node = static_cast<int>(i); node >= 0; node = sequence.parents[node])
            row[node / 64] |= uint64_t{1} << node % 64;
        }
        bits.insert(bits.end(), row.begin(), row.end());
      }
    }
    for (const float value : pool.values) narrow.push_back(FloatToBf16(value));
  }

  Tensor PoolTensor() {
    return {pool_dtype == DType::kF32 ? static_cast<void*>(pool.values.data()) : narrow.data(), pool_dtype,
            pool.rows, pool.cols, pool.stride};
  }

  Matrix Run(Backend& backend) {
    Matrix out(q.rows, dims.heads * dims.latent, 3);
    REQUIRE(backend
                .VerifyAttention({q.tensor(), PoolTensor(), dims.heads, dims.latent, dims.rope, scale,
                                  static_cast<int64_t>(sequences.size()), row_begin.data(), context.data(),
                                  causal.data(), table.data(), table_stride, bits.data(), out.tensor()})
                .ok());
    CHECK(out.GapsUntouched());
    return out;
  }

  // Slots row i of a sequence sees, in position order.
  static std::vector<int32_t> Visible(const Sequence& sequence, int i) {
    std::vector<int32_t> own;
    for (int node = i; node >= 0; node = sequence.causal ? node - 1 : sequence.parents[node]) {
      own.push_back(sequence.slots[sequence.context + node]);
    }
    std::vector<int32_t> visible(sequence.slots.begin(), sequence.slots.begin() + sequence.context);
    visible.insert(visible.end(), own.rbegin(), own.rend());
    return visible;
  }

  // One row as plain decoding sees it: its path committed in order in another pool, in other slots, itself
  // the root.
  Matrix Plain(Backend& backend, const Sequence& sequence, int64_t row, int i, std::mt19937& rng) {
    const std::vector<int32_t> visible = Visible(sequence, i);
    const int64_t size = static_cast<int64_t>(visible.size());
    std::vector<int32_t> slots(size + 3);
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), rng);
    Matrix own_pool(size + 3, dims.width());
    std::fill(own_pool.values.begin(), own_pool.values.end(), NAN);
    std::vector<uint16_t> own_narrow(own_pool.values.size());
    for (int64_t p = 0; p < size; ++p) {
      std::copy(pool.row(visible[p]), pool.row(visible[p]) + dims.width(), own_pool.row(slots[p]));
      std::copy(narrow.begin() + visible[p] * pool.stride,
                narrow.begin() + visible[p] * pool.stride + dims.width(),
                own_narrow.begin() + slots[p] * dims.width());
    }
    const int32_t begin[] = {0, 1};
    const int32_t length = static_cast<int32_t>(size - 1);
    const uint8_t chain = 0;
    const uint64_t self[kAncestorWords] = {1};
    Matrix out(1, dims.heads * dims.latent);
    void* data = pool_dtype == DType::kF32 ? static_cast<void*>(own_pool.values.data()) : own_narrow.data();
    REQUIRE(
        backend
            .VerifyAttention({q.tensor().Rows(row, 1), MakeTensor(data, pool_dtype, size + 3, dims.width()),
                              dims.heads, dims.latent, dims.rope, scale, 1, begin, &length, &chain,
                              slots.data(), size + 3, self, out.tensor()})
            .ok());
    return out;
  }

  Dims dims;
  float scale;
  DType pool_dtype;
  std::vector<Sequence> sequences;
  Matrix pool, q;
  std::vector<uint16_t> narrow;
  std::vector<int32_t> row_begin, context;
  std::vector<uint8_t> causal;
  std::vector<int32_t> table;
  int64_t table_stride = 0;
  std::vector<uint64_t> bits;
};

Sequence Tree(int64_t context, int nodes, std::mt19937& rng) {
  Sequence sequence{context, false, {-1}, {}};
  for (int i = 1; i < nodes; ++i) sequence.parents.push_back(static_cast<int>(rng() % i));
  return sequence;
}

Sequence Chain(int64_t context, int rows, bool causal) {
  Sequence sequence{context, causal, {}, {}};
  for (int i = 0; i < rows; ++i) sequence.parents.push_back(i - 1);
  return sequence;
}

double WorstError(Case& c, const Matrix& out) {
  double worst = 0;
  int64_t row = 0;
  for (const Sequence& sequence : c.sequences) {
    for (size_t i = 0; i < sequence.parents.size(); ++i, ++row) {
      const std::vector<int32_t> visible = Case::Visible(sequence, static_cast<int>(i));
      for (int64_t h = 0; h < c.dims.heads; ++h) {
        const auto key = [&](int32_t slot, int64_t d) -> double {
          return c.pool_dtype == DType::kF32 ? c.pool.at(slot, d)
                                             : Bf16ToFloat(c.narrow[slot * c.pool.stride + d]);
        };
        std::vector<double> p;
        for (const int32_t slot : visible) {
          double dot = 0;
          for (int64_t d = 0; d < c.dims.width(); ++d)
            dot += c.q.at(row, h * c.dims.width() + d) * key(slot, d);
          p.push_back(dot * c.scale);
        }
        const double max = *std::max_element(p.begin(), p.end());
        double sum = 0;
        for (double& value : p) sum += value = std::exp(value - max);
        for (int64_t d = 0; d < c.dims.latent; ++d) {
          double expected = 0;
          for (size_t k = 0; k < p.size(); ++k) expected += p[k] / sum * key(visible[k], d);
          worst = std::max(worst, std::abs(out.at(row, h * c.dims.latent + d) - expected));
        }
      }
    }
  }
  return worst;
}

TEST_CASE("verify_attention agrees with float64 on ragged batches", "[verify_attention]") {
  std::mt19937 rng(20);
  const auto backend = MakeBackend(2);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Dims& dims : {Dims{8, 64, 16}, Dims{1, 512, 64}, Dims{3, 37, 5}}) {
      Case c(dims,
             {Tree(0, 1, rng), Tree(130, 20, rng), Chain(0, 9, true), Sequence{50, false, {}, {}},
              Chain(63, 70, true), Tree(64, 1, rng), Tree(5, 80, rng), Chain(200, 3, false)},
             rng, 0.2f, dtype);
      CHECK(WorstError(c, c.Run(*backend)) < 5e-6);
    }
  }
}

TEST_CASE("verify_attention with large, equal and dominated scores", "[verify_attention]") {
  std::mt19937 rng(21);
  const auto backend = MakeBackend();
  const Dims dims{2, 48, 16};
  Case large(dims, {Tree(150, 12, rng), Chain(70, 90, true)}, rng, 40.0f);
  // Scores of some hundreds: float32 rounding of the score itself is the error.
  CHECK(WorstError(large, large.Run(*backend)) < 2e-2);
  Case equal(dims, {Tree(150, 12, rng)}, rng);
  std::fill(equal.q.values.begin(), equal.q.values.end(), 0.0f);
  CHECK(WorstError(equal, equal.Run(*backend)) < 1e-6);
}

TEST_CASE("a tree row has the bits of plain decoding at its position", "[verify_attention][bits]") {
  std::mt19937 rng(22);
  const Dims dims{4, 96, 32};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t context : {0, 1, 40, 63, 64, 65, 127, 200}) {
      Case c(dims,
             {Tree(context, 64, rng), Chain(context, 30, true), Tree(context, 200, rng), Chain(0, 100, true)},
             rng, 0.5f, dtype);
      const auto single = MakeBackend(1);
      const Matrix together = c.Run(*single);
      for (const int threads : {2, 3}) CHECK(SameBits(together, c.Run(*MakeBackend(threads))));
      int64_t row = 0;
      bool same = true;
      for (const Sequence& sequence : c.sequences) {
        for (size_t i = 0; i < sequence.parents.size(); ++i, ++row) {
          const Matrix plain = c.Plain(*single, sequence, row, static_cast<int>(i), rng);
          same = same && SameBits(plain.row(0), together.row(row), plain.cols);
        }
      }
      INFO("context " << context);
      CHECK(same);
    }
  }
}

TEST_CASE("a broken row of a chunk or tree does not touch the others", "[verify_attention]") {
  std::mt19937 rng(23);
  const Dims dims{2, 32, 8};
  Case c(dims, {Chain(10, 20, true), Tree(70, 20, rng)}, rng);
  const auto backend = MakeBackend();
  const Matrix before = c.Run(*backend);
  // The last row of each: nobody else may see its key.
  for (const Sequence& sequence : c.sequences) {
    const int64_t slot = sequence.slots.back();
    std::fill(c.pool.row(slot), c.pool.row(slot) + dims.width(), NAN);
  }
  const Matrix after = c.Run(*backend);
  for (int64_t row = 0; row < 40; ++row) {
    if (row % 20 == 19) {
      CHECK(std::isnan(after.at(row, 0)));
    } else {
      CHECK(SameBits(before.row(row), after.row(row), before.cols));
    }
  }
}

TEST_CASE("rows outside every sequence are left as they are", "[verify_attention]") {
  std::mt19937 rng(24);
  const Dims dims{2, 32, 8};
  Case c(dims, {Tree(10, 4, rng)}, rng);
  Matrix q(7, c.q.cols), out(7, dims.heads * dims.latent);
  q.Fill(rng);
  std::fill(out.values.begin(), out.values.end(), 5.0f);
  const auto backend = MakeBackend(2);
  const auto run = [&](int64_t sequences) {
    REQUIRE(backend
                ->VerifyAttention({q.tensor(), c.PoolTensor(), dims.heads, dims.latent, dims.rope, c.scale,
                                   sequences, c.row_begin.data(), c.context.data(), c.causal.data(),
                                   c.table.data(), c.table_stride, c.bits.data(), out.tensor()})
                .ok());
  };
  run(0);
  CHECK(out.at(0, 0) == 5.0f);
  run(1);
  CHECK(out.at(3, 0) != 5.0f);
  for (int64_t row = 4; row < 7; ++row) {
    for (int64_t col = 0; col < out.cols; ++col) CHECK(out.at(row, col) == 5.0f);
  }
}

}  // namespace
}  // namespace kdt::kernels::test
