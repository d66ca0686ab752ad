#include "kdt/kernels/gemm.h"

#include "tests/kernels/cpu/util.h"

namespace kdt::kernels::test {
namespace {

struct Shape {
  int64_t rows, inputs, outs;
};

TEST_CASE("gemm agrees with float64 on many shapes", "[gemm]") {
  std::mt19937 rng(1);
  const auto backend = MakeBackend(2);
  const Shape shapes[] = {{1, 256, 256}, {2, 32, 8},    {3, 31, 7},   {5, 1, 1},    {64, 256, 40},
                          {7, 100, 9},   {1, 257, 600}, {33, 65, 17}, {512, 48, 24}};
  for (const Shape& shape : shapes) {
    for (const bool accumulate : {false, true}) {
      Matrix x(shape.rows, shape.inputs, 3), y(shape.rows, shape.outs, 5);
      Bf16Matrix w(shape.outs, shape.inputs);
      x.Fill(rng);
      y.Fill(rng);
      w.Fill(rng);
      const Matrix before = y;
      REQUIRE(backend->Gemm({x.tensor(), w.tensor(), y.tensor(), accumulate}).ok());
      double worst = 0;
      for (int64_t r = 0; r < shape.rows; ++r) {
        for (int64_t o = 0; o < shape.outs; ++o) {
          double sum = accumulate ? before.at(r, o) : 0.0, size = std::abs(sum);
          for (int64_t i = 0; i < shape.inputs; ++i) {
            const double term = static_cast<double>(x.at(r, i)) * w.at(o, i);
            sum += term;
            size += std::abs(term);
          }
          worst = std::max(worst, std::abs(y.at(r, o) - sum) / (size + 1e-30));
        }
      }
      INFO(shape.rows << "x" << shape.inputs << "x" << shape.outs);
      CHECK(worst < 1e-6);
      CHECK(y.GapsUntouched());
    }
  }
}

TEST_CASE("a gated gemm has the bits of silu_mul before it", "[gemm][bits]") {
  std::mt19937 rng(4);
  const auto backend = MakeBackend(2);
  for (const Shape& shape : {Shape{1, 256, 40}, Shape{9, 31, 7}, Shape{33, 16, 64}}) {
    for (const bool accumulate : {false, true}) {
      Matrix x(shape.rows, 2 * shape.inputs, 3), act(shape.rows, shape.inputs);
      Matrix separate(shape.rows, shape.outs, 5), fused(shape.rows, shape.outs, 5);
      Bf16Matrix w(shape.outs, shape.inputs);
      x.Fill(rng);
      w.Fill(rng);
      separate.Fill(rng);
      for (int64_t r = 0; r < shape.rows; ++r) std::copy_n(separate.row(r), shape.outs, fused.row(r));
      REQUIRE(backend->SiluMul({x.tensor(), act.tensor()}).ok());
      REQUIRE(backend->Gemm({act.tensor(), w.tensor(), separate.tensor(), accumulate}).ok());
      GemmArgs args{x.tensor(), w.tensor(), fused.tensor(), accumulate};
      args.gated = true;
      REQUIRE(backend->Gemm(args).ok());
      CHECK(SameBits(fused, separate));
      CHECK(fused.GapsUntouched());
    }
  }
}

TEST_CASE("a gemm with a matrix beside has the bits of the ops one by one", "[gemm][bits]") {
  std::mt19937 rng(6);
  const auto backend = MakeBackend(2);
  for (const Shape& shape : {Shape{1, 256, 40}, Shape{9, 31, 7}, Shape{33, 16, 64}}) {
    constexpr int64_t kInner = 12;
    Matrix x(shape.rows, shape.inputs, 3), both(shape.rows, 2 * kInner);
    Matrix y(shape.rows, shape.outs, 5), beside(shape.rows, kInner, 2),
        plain_beside(shape.rows, 2 * kInner, 2);
    Matrix alone(shape.rows, shape.outs, 5), activated(shape.rows, kInner, 2);
    Bf16Matrix w(shape.outs, shape.inputs), beside_w(2 * kInner, shape.inputs);
    x.Fill(rng);
    w.Fill(rng);
    beside_w.Fill(rng);
    REQUIRE(backend->Gemm({x.tensor(), w.tensor(), alone.tensor()}).ok());
    REQUIRE(backend->Gemm({x.tensor(), beside_w.tensor(), both.tensor()}).ok());
    REQUIRE(backend->SiluMul({both.tensor(), activated.tensor()}).ok());
    GemmArgs args{x.tensor(), w.tensor(), y.tensor()};
    args.beside_w = beside_w.tensor();
    args.beside_y = plain_beside.tensor();
    REQUIRE(backend->Gemm(args).ok());
    CHECK(SameBits(plain_beside, both));
    args.beside_gated = true;
    args.beside_y = beside.tensor();
    REQUIRE(backend->Gemm(args).ok());
    CHECK(SameBits(y, alone));
    CHECK(SameBits(beside, activated));
    CHECK((y.GapsUntouched() && beside.GapsUntouched() && plain_beside.GapsUntouched()));
  }
}

TEST_CASE("a gemm row has the same bits alone, in any batch and with any thread count", "[gemm][bits]") {
  std::mt19937 rng(2);
  for (const int64_t inputs : {int64_t{256}, int64_t{100}}) {
    constexpr int64_t kRows = 512, kOuts = 83;
    Matrix x(kRows, inputs), alone(kRows, kOuts);
    Bf16Matrix w(kOuts, inputs);
    x.Fill(rng);
    w.Fill(rng);
    const auto single = MakeBackend(1);
    for (int64_t r = 0; r < kRows; ++r) {
      REQUIRE(single->Gemm({x.tensor().Rows(r, 1), w.tensor(), alone.tensor().Rows(r, 1)}).ok());
    }
    for (const int threads : {1, 2, 3}) {
      const auto backend = MakeBackend(threads);
      for (const int64_t rows : {2, 3, 4, 7, 8, 64, 65, 512}) {
        Matrix y(rows, kOuts);
        REQUIRE(backend->Gemm({x.tensor().Rows(kRows - rows, rows), w.tensor(), y.tensor()}).ok());
        bool same = true;
        for (int64_t r = 0; r < rows; ++r)
          same = same && SameBits(y.row(r), alone.row(kRows - rows + r), kOuts);
        INFO(rows << " rows, " << threads << " threads, " << inputs << " inputs");
        CHECK(same);
      }
    }
  }
}

TEST_CASE("gemm lets NaN through to its own row only", "[gemm]") {
  std::mt19937 rng(3);
  Matrix x(4, 64), y(4, 16);
  Bf16Matrix w(16, 64);
  x.Fill(rng);
  w.Fill(rng);
  x.at(2, 5) = NAN;
  REQUIRE(MakeBackend()->Gemm({x.tensor(), w.tensor(), y.tensor()}).ok());
  for (int64_t r = 0; r < 4; ++r) {
    for (int64_t o = 0; o < 16; ++o) CHECK(std::isnan(y.at(r, o)) == (r == 2));
  }
}

TEST_CASE("gemm of no rows does nothing", "[gemm]") {
  Bf16Matrix w(8, 32);
  const Tensor x = MakeTensor(nullptr, DType::kF32, 0, 32), y = MakeTensor(nullptr, DType::kF32, 0, 8);
  CHECK(MakeBackend(2)->Gemm({x, w.tensor(), y}).ok());
}

}  // namespace
}  // namespace kdt::kernels::test
