// Gemm, the absorbed projections, router and routed experts.
#include "tests/kernels/cuda/util.h"

namespace kdt::kernels::test {
namespace {

std::vector<float> Product(const std::vector<float>& x, const std::vector<float>& w, int64_t rows,
                           int64_t outs, int64_t in) {
  std::vector<float> y(rows * outs);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < outs; ++o) {
      double sum = 0;
      for (int64_t i = 0; i < in; ++i) sum += static_cast<double>(x[r * in + i]) * w[o * in + i];
      y[r * outs + o] = static_cast<float>(sum);
    }
  }
  return y;
}

TEST_CASE("cuda: gemm against float64, and a row's bits do not depend on the other rows") {
  KDT_NEED_GPU();
  std::mt19937 rng(5);
  struct Shape {
    int64_t outs, in;
  };
  for (const Shape s :
       {Shape{576, 512}, Shape{33, 96}, Shape{4100, 256}, Shape{256, 7168}, Shape{8, 32},
        // All inputs in a block, weights that stay on the chip, more tiles than the chip holds; a last piece
        // of 32 inputs.
        Shape{2112, 1312}, Shape{896, 3232}, Shape{7168, 288}, Shape{4260, 800}, Shape{17000, 96},
        // An even share of the outputs a block: three shares of the inputs, one, several tiles, four; and too
        // many outputs for that, so a stream.
        Shape{4606, 1056}, Shape{6803, 1056}, Shape{7401, 1056}, Shape{2110, 3104}, Shape{5410, 1056}}) {
    Twin w(rng, s.outs, s.in), all(rng, 130, s.in);
    const std::vector<float> reference = Product(all.host, w.host, 130, s.outs, s.in);
    // Many rows go other ways: by the library where it is installed, and never with a y at odd addresses.
    OnGpu<float> many(130 * s.outs, 0xff), odd(130 * (s.outs + 1), 0xff);
    REQUIRE(Gpu()->Gemm({all.gpu(), w.gpu(), MakeTensor(many.data(), DType::kF32, 130, s.outs)}).ok());
    CHECK(RelativeError(many.Get(), reference) < 1e-5);
    const Tensor shifted = MakeTensor(odd.data(), DType::kF32, 130, s.outs + 1).Columns(1, s.outs);
    REQUIRE(Gpu()->Gemm({all.gpu(), w.gpu(), shifted}).ok());
    std::vector<float> unshifted;
    const std::vector<float> all_odd = odd.Get();
    for (int64_t r = 0; r < 130; ++r) {
      unshifted.insert(unshifted.end(), all_odd.begin() + r * (s.outs + 1) + 1,
                       all_odd.begin() + (r + 1) * (s.outs + 1));
    }
    CHECK(RelativeError(unshifted, reference) < 1e-5);

    OnGpu<float> y(64 * s.outs, 0xff);
    REQUIRE(
        Gpu()->Gemm({all.gpu().Rows(0, 64), w.gpu(), MakeTensor(y.data(), DType::kF32, 64, s.outs)}).ok());
    const std::vector<float> whole = y.Get();
    CHECK(RelativeError(whole, std::vector<float>(reference.begin(), reference.begin() + 64 * s.outs)) <
          1e-5);
    for (const int64_t rows : {1, 8, 9, 16, 17, 31, 33, 63}) {
      OnGpu<float> part(rows * s.outs, 0xff);
      REQUIRE(
          Gpu()
              ->Gemm({all.gpu().Rows(0, rows), w.gpu(), MakeTensor(part.data(), DType::kF32, rows, s.outs)})
              .ok());
      const std::vector<float> got = part.Get();
      CHECK(std::memcmp(got.data(), whole.data(), got.size() * sizeof(float)) == 0);
    }
    Twin sum(rng, 5, s.outs);
    std::vector<float> expected(sum.host);
    for (size_t i = 0; i < expected.size(); ++i) expected[i] += reference[i];
    REQUIRE(Gpu()->Gemm({all.gpu().Rows(0, 5), w.gpu(), sum.gpu(), true}).ok());
    CHECK(RelativeError(sum.FromGpu(), expected) < 4e-3);
  }
}

TEST_CASE("cuda: gemm of any width, alignment and stride") {
  KDT_NEED_GPU();
  std::mt19937 rng(15);
  for (const int64_t in : {16, 24, 48, 100, 7168}) {
    const int64_t outs = 70, rows = 11;
    Twin w(rng, outs, in), x(rng, rows, in);
    const std::vector<float> reference = Product(x.host, w.host, rows, outs, in);
    // y is a column range of a wider matrix, whose other columns stay.
    Twin wide(rng, rows, outs + 7);
    std::vector<float> expected(wide.host);
    for (int64_t r = 0; r < rows; ++r)
      std::copy_n(reference.begin() + r * outs, outs, expected.begin() + r * (outs + 7) + 3);
    REQUIRE(Gpu()->Gemm({x.gpu(), w.gpu(), wide.gpu().Columns(3, outs)}).ok());
    CHECK(RelativeError(wide.FromGpu(), expected) < 4e-3);
    const std::vector<float> got = wide.FromGpu();
    for (int64_t r = 0; r < rows; ++r) {
      CHECK(std::equal(got.begin() + r * (outs + 7), got.begin() + r * (outs + 7) + 3,
                       wide.host.begin() + r * (outs + 7)));
    }
  }
  // x as a column range whose rows start at no multiple of 16 bytes.
  Twin w(rng, 64, 64), wide(rng, 5, 99);
  std::vector<float> x;
  for (int64_t r = 0; r < 5; ++r)
    x.insert(x.end(), wide.host.begin() + r * 99 + 1, wide.host.begin() + r * 99 + 65);
  OnGpu<float> y(5 * 64, 0xff);
  REQUIRE(Gpu()->Gemm({wide.gpu().Columns(1, 64), w.gpu(), MakeTensor(y.data(), DType::kF32, 5, 64)}).ok());
  CHECK(RelativeError(y.Get(), Product(x, w.host, 5, 64, 64)) < 1e-5);
}

TEST_CASE("cuda: a gated gemm against silu_mul and gemm") {
  KDT_NEED_GPU();
  std::mt19937 rng(18);
  for (const int64_t in : {16, 256, 2304}) {
    for (const int64_t rows : {1, 9, 40, 70}) {
      Twin x(rng, rows, 2 * in), w(rng, 200, in), y(rng, rows, 200);
      GemmArgs args{x.cpu(), w.cpu_bf16(), y.cpu()};
      args.gated = true;
      REQUIRE(Cpu().Gemm(args).ok());
      args.x = x.gpu(), args.w = w.gpu(), args.y = y.gpu();
      REQUIRE(Gpu()->Gemm(args).ok());
      CHECK(RelativeError(y.FromGpu(), y.host) < 6e-3);
    }
  }
}

TEST_CASE("cuda: a gemm with a matrix beside against the ops one by one") {
  KDT_NEED_GPU();
  std::mt19937 rng(19);
  // Both in one kernel, with four and with eight shares of the inputs or more rows; too many rows; inputs
  // that the skinny kernels do not take.
  struct Shape {
    int64_t outs, inner, in;
  };
  for (const Shape s : {Shape{384, 256, 7168}, Shape{1000, 520, 2048}, Shape{40, 24, 100}}) {
    for (const int64_t rows : {1, 8, 40, 70}) {
      Twin x(rng, rows, s.in), w(rng, s.outs, s.in), beside(rng, 2 * s.inner, s.in, 0.05f);
      const auto bf16 = [](OnGpu<uint16_t>& y, int64_t r, int64_t cols) {
        return MakeTensor(y.data(), DType::kBF16, r, cols);
      };
      OnGpu<float> y(rows * s.outs, 0xff);
      OnGpu<uint16_t> both(rows * 2 * s.inner, 0xff), inner(rows * s.inner, 0xff);
      GemmArgs args{x.gpu(), w.gpu(), MakeTensor(y.data(), DType::kF32, rows, s.outs)};
      args.beside_w = beside.gpu();
      args.beside_y = bf16(inner, rows, s.inner);
      args.beside_gated = true;
      REQUIRE(Gpu()->Gemm(args).ok());
      const std::vector<float> expected_y = Product(x.host, w.host, rows, s.outs, s.in);
      CHECK(RelativeError(y.Get(), expected_y) < 1e-5);
      REQUIRE(Gpu()->Gemm({x.gpu(), beside.gpu(), bf16(both, rows, 2 * s.inner)}).ok());
      OnGpu<uint16_t> activated(rows * s.inner, 0xff);
      REQUIRE(Gpu()->SiluMul({bf16(both, rows, 2 * s.inner), bf16(activated, rows, s.inner)}).ok());
      CHECK(RelativeError(ToFloat(inner.Get()), ToFloat(activated.Get())) < 4e-3);
      args.beside_gated = false;
      args.beside_y = bf16(both, rows, 2 * s.inner);
      REQUIRE(Gpu()->Gemm(args).ok());
      CHECK(RelativeError(ToFloat(both.Get()), Product(x.host, beside.host, rows, 2 * s.inner, s.in)) < 4e-3);
    }
  }
}

TEST_CASE("cuda: a row with NaN leaves the others as they are") {
  KDT_NEED_GPU();
  std::mt19937 rng(16);
  struct Shape {
    int64_t outs, in;
  };
  // Weights that stay on the chip, all inputs in a block, an even share of the outputs, more tiles than the
  // chip holds.
  for (const Shape s : {Shape{96, 512}, Shape{256, 7168}, Shape{4606, 1056}, Shape{17000, 96}}) {
    Twin w(rng, s.outs, s.in);
    for (const int64_t rows : {3, 12, 20, 50}) {
      CAPTURE(s.outs, rows);
      const int64_t broken = rows / 3;
      Twin x(rng, rows, s.in);
      OnGpu<float> clean(rows * s.outs, 0xff), poisoned(rows * s.outs, 0xff);
      REQUIRE(Gpu()->Gemm({x.gpu(), w.gpu(), MakeTensor(clean.data(), DType::kF32, rows, s.outs)}).ok());
      std::fill_n(x.bits.begin() + broken * s.in, s.in, uint16_t{0x7fc0});
      x.device.Set(x.bits);
      REQUIRE(Gpu()->Gemm({x.gpu(), w.gpu(), MakeTensor(poisoned.data(), DType::kF32, rows, s.outs)}).ok());
      const std::vector<float> a = clean.Get(), b = poisoned.Get();
      for (int64_t r = 0; r < rows; ++r) {
        const bool same =
            std::memcmp(a.data() + r * s.outs, b.data() + r * s.outs, s.outs * sizeof(float)) == 0;
        CHECK(same == (r != broken));
      }
    }
  }
}

TEST_CASE("cuda: absorbed projections against the CPU") {
  KDT_NEED_GPU();
  std::mt19937 rng(6);
  for (const int64_t rows : {1, 8, 13, 32, 70}) {
    Twin q(rng, rows, 4 * 192), w(rng, 4 * 256, 512, 0.05f), out(rng, rows, 4 * 576);
    REQUIRE(Cpu().AbsorbQuery({q.cpu(), w.bits.data(), 4, 128, 64, 128, 512, out.cpu()}).ok());
    REQUIRE(Gpu()->AbsorbQuery({q.gpu(), w.gpu().bf16(), 4, 128, 64, 128, 512, out.gpu()}).ok());
    CHECK(RelativeError(out.FromGpu(), out.host) < 4e-3);
    // The same with the rotation on the way.
    std::vector<int32_t> positions(rows);
    for (int64_t r = 0; r < rows; ++r) positions[r] = static_cast<int32_t>(r * 20161);
    std::vector<float> inv_freq(32);
    for (int i = 0; i < 32; ++i) inv_freq[i] = std::pow(50000.0f, -static_cast<float>(i) / 32.0f);
    const OnGpu<int32_t> device_positions(positions);
    const OnGpu<float> device_freq(inv_freq);
    AbsorbQueryArgs rotated{q.cpu(), w.bits.data(), 4, 128, 64, 128, 512, out.cpu()};
    rotated.positions = positions.data(), rotated.inv_freq = inv_freq.data();
    rotated.attention_factor = 1.25f;
    REQUIRE(Cpu().AbsorbQuery(rotated).ok());
    rotated.q = q.gpu(), rotated.w_kv_b = w.gpu().bf16(), rotated.out = out.gpu();
    rotated.positions = device_positions.data(), rotated.inv_freq = device_freq.data();
    REQUIRE(Gpu()->AbsorbQuery(rotated).ok());
    CHECK(RelativeError(out.FromGpu(), out.host) < 4e-3);
    Twin attended(rng, rows, 4 * 512), value(rng, rows, 4 * 128);
    REQUIRE(Cpu().AbsorbValue({attended.cpu(), w.bits.data(), 4, 128, 128, 512, value.cpu()}).ok());
    REQUIRE(Gpu()->AbsorbValue({attended.gpu(), w.gpu().bf16(), 4, 128, 128, 512, value.gpu()}).ok());
    CHECK(RelativeError(value.FromGpu(), value.host) < 4e-3);
  }
}

TEST_CASE("cuda: the router chooses as the CPU does") {
  KDT_NEED_GPU();
  std::mt19937 rng(7);
  const int64_t rows = 17, experts = 384, top_k = 8;
  Twin x(rng, rows, 512), w(rng, experts, 512, 0.05f);
  std::vector<float> bias = Normal(rng, experts, 0.1f);
  bias[11] = bias[12];  // and equal weights: a tie goes to the lower index
  std::copy_n(w.host.begin() + 11 * 512, 512, w.host.begin() + 12 * 512);
  std::copy_n(w.bits.begin() + 11 * 512, 512, w.bits.begin() + 12 * 512);
  w.device.Set(w.bits);
  const OnGpu<float> device_bias(bias), w32(w.host);
  std::vector<int32_t> ids(rows * top_k);
  std::vector<float> weights(rows * top_k);
  REQUIRE(Cpu()
              .Router({x.cpu(), w.cpu_bf16(), bias.data(), top_k, true, 2.827f, ids.data(), weights.data()})
              .ok());
  const Tensor forms[2] = {w.gpu(), MakeTensor(w32.data(), DType::kF32, experts, 512)};
  for (const Tensor& form : forms) {
    OnGpu<int32_t> device_ids(ids.size(), 0xff);
    OnGpu<float> device_weights(weights.size(), 0xff);
    REQUIRE(Gpu()
                ->Router({x.gpu(), form, device_bias.data(), top_k, true, 2.827f, device_ids.data(),
                          device_weights.data()})
                .ok());
    CHECK(device_ids.Get() == ids);
    CHECK(RelativeError(device_weights.Get(), weights) < 1e-5);
  }
}

TEST_CASE("cuda: the router with ties, NaN, padding rows and many rows") {
  KDT_NEED_GPU();
  std::mt19937 rng(17);
  for (const int64_t rows : {1, 3, 64, 65, 256}) {
    const int64_t experts = 200, top_k = 6, hidden = 256;
    // Few different weight rows, so most scores are equal to others.
    Twin x(rng, rows, hidden), base(rng, 9, hidden, 0.05f);
    std::vector<float> values;
    for (int64_t e = 0; e < experts; ++e)
      values.insert(values.end(), base.host.begin() + e % 9 * hidden,
                    base.host.begin() + (e % 9 + 1) * hidden);
    Twin w(values, experts, hidden);
    std::vector<float> bias(experts, 0.0f);
    bias[5] = std::nanf("");
    bias[7] = -INFINITY;
    if (rows > 2) {  // a broken row
      x.host[2 * hidden] = std::nanf("");
      x.bits[2 * hidden] = 0x7fc0;
      x.device.Set(x.bits);
    }
    const int32_t real = static_cast<int32_t>(rows > 3 ? rows - 2 : rows);
    const OnGpu<int32_t> device_real(std::vector<int32_t>{real});
    const OnGpu<float> device_bias(bias);
    std::vector<int32_t> ids(rows * top_k);
    std::vector<float> weights(rows * top_k);
    RouterArgs args{x.cpu(), w.cpu_bf16(), bias.data(), top_k, true, 2.5f, ids.data(), weights.data()};
    args.row_count = &real;
    const int64_t inner = rows == 3 ? 40 : 64;  // 40: the product behind it takes another way
    Twin gate_up(rng, 2 * inner, hidden, 0.05f), down(rng, 70, inner), between(rng, rows, 2 * inner),
        shared(rng, rows, 70);
    args.shared_gate_up = gate_up.cpu_bf16(), args.shared_down = down.cpu_bf16();
    args.shared_inner = between.cpu(), args.shared_y = shared.cpu();
    REQUIRE(Cpu().Router(args).ok());
    OnGpu<int32_t> device_ids(ids.size(), 0x55);
    OnGpu<float> device_weights(weights.size(), 0x55);
    args = {x.gpu(), w.gpu(), device_bias.data(), top_k,
            true,    2.5f,    device_ids.data(),  device_weights.data()};
    args.row_count = device_real.data();
    args.shared_gate_up = gate_up.gpu(), args.shared_down = down.gpu();
    args.shared_inner = between.gpu(), args.shared_y = shared.gpu();
    REQUIRE(Gpu()->Router(args).ok());
    const std::vector<float> projected = shared.FromGpu();
    std::vector<float> got_all, expected_all;
    for (int64_t r = 0; r < rows; ++r) {
      if (rows > 2 && r == 2) continue;
      const auto row = [&](const std::vector<float>& all) {
        return std::vector<float>(all.begin() + r * 70, all.begin() + (r + 1) * 70);
      };
      const std::vector<float> a = row(projected), b = row(shared.host);
      if (!(RelativeError(a, b) < 2e-2)) FAIL_CHECK("shared, row " << r << ": " << RelativeError(a, b));
      got_all.insert(got_all.end(), a.begin(), a.end());
      expected_all.insert(expected_all.end(), b.begin(), b.end());
    }
    CHECK(RelativeError(got_all, expected_all) < 6e-3);
    CHECK(device_ids.Get() == ids);
    const std::vector<float> got = device_weights.Get();
    for (size_t i = 0; i < got.size(); ++i) {
      const bool both_nan = std::isnan(got[i]) && std::isnan(weights[i]);
      if (!both_nan && std::abs(got[i] - weights[i]) > 1e-4f) {
        FAIL_CHECK("row " << i / top_k << ": " << got[i] << " for " << weights[i]);
      }
    }
  }
}

TEST_CASE("cuda: what the router's op gives a row does not depend on the other rows") {
  KDT_NEED_GPU();
  std::mt19937 rng(19);
  const int64_t experts = 384, hidden = 7168, inner = 256, out = 7168, top_k = 8;
  Twin x(rng, 64, hidden), w(rng, experts, hidden, 0.02f), gate_up(rng, 2 * inner, hidden, 0.02f),
      down(rng, out, inner, 0.06f);
  const OnGpu<float> bias(Normal(rng, experts, 0.1f));
  std::vector<int32_t> all_ids;
  std::vector<float> all_weights;
  std::vector<uint16_t> all_shared;
  for (const int64_t rows : {64, 33, 32, 17, 16, 9, 8, 3, 1}) {
    OnGpu<int32_t> ids(rows * top_k, 0x55);
    OnGpu<float> weights(rows * top_k, 0x55);
    const OnGpu<uint16_t> between(rows * 2 * inner, 0xff), shared(rows * out, 0xff);
    RouterArgs args{x.gpu().Rows(0, rows), w.gpu(), bias.data(), top_k, true, 2.5f, ids.data(),
                    weights.data()};
    args.shared_gate_up = gate_up.gpu(), args.shared_down = down.gpu();
    args.shared_inner = MakeTensor(between.data(), DType::kBF16, rows, 2 * inner);
    args.shared_y = MakeTensor(shared.data(), DType::kBF16, rows, out);
    REQUIRE(Gpu()->Router(args).ok());
    const std::vector<int32_t> got_ids = ids.Get();
    const std::vector<float> got_weights = weights.Get();
    const std::vector<uint16_t> got_shared = shared.Get();
    if (rows == 64) all_ids = got_ids, all_weights = got_weights, all_shared = got_shared;
    INFO(rows << " rows");
    CHECK(std::equal(got_ids.begin(), got_ids.end(), all_ids.begin()));
    CHECK(std::memcmp(got_weights.data(), all_weights.data(), got_weights.size() * sizeof(float)) == 0);
    CHECK(std::equal(got_shared.begin(), got_shared.end(), all_shared.begin()));
  }
  std::vector<float> reference(64 * 2 * inner), activated(64 * inner);
  reference = Product(x.host, gate_up.host, 64, 2 * inner, hidden);
  for (int64_t r = 0; r < 64; ++r) {
    for (int64_t i = 0; i < inner; ++i) {
      const float gate = reference[r * 2 * inner + i];
      activated[r * inner + i] = gate / (1.0f + std::exp(-gate)) * reference[r * 2 * inner + inner + i];
    }
  }
  CHECK(RelativeError(ToFloat(all_shared), Product(activated, down.host, 64, out, inner)) < 6e-3);
}

}  // namespace
}  // namespace kdt::kernels::test
