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
  for (const Shape s : {Shape{576, 512}, Shape{33, 96}, Shape{4100, 256}, Shape{256, 7168}, Shape{8, 32}}) {
    Twin w(rng, s.outs, s.in), all(rng, 130, s.in);
    const std::vector<float> reference = Product(all.host, w.host, 130, s.outs, s.in);
    OnGpu<float> y(130 * s.outs, 0xff);
    REQUIRE(Gpu()->Gemm({all.gpu(), w.gpu(), MakeTensor(y.data(), DType::kF32, 130, s.outs)}).ok());
    const std::vector<float> whole = y.Get();
    CHECK(RelativeError(whole, reference) < 1e-5);
    for (const int64_t rows : {1, 8, 9, 16, 31, 64}) {
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

TEST_CASE("cuda: absorbed projections against the CPU") {
  KDT_NEED_GPU();
  std::mt19937 rng(6);
  for (const int64_t rows : {1, 8, 13}) {
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

TEST_CASE("cuda: routed experts against the CPU") {
  KDT_NEED_GPU();
  std::mt19937 rng(8);
  struct Shape {
    int64_t rows, experts, top_k, hidden, inner, first;
  };
  for (const Shape s : {Shape{1, 16, 4, 256, 128, 0}, Shape{9, 6, 4, 512, 256, 0}, Shape{40, 4, 2, 96, 32, 2},
                        Shape{300, 3, 2, 256, 128, 0}, Shape{2, 8, 8, 7168, 256, 0}}) {
    const int64_t all = s.experts + 2 * s.first;  // experts of all ranks
    std::vector<uint32_t> gate_up(s.experts * 2 * s.inner * s.hidden / 8),
        down(s.experts * s.hidden * s.inner / 8);
    for (uint32_t& v : gate_up) v = rng();
    for (uint32_t& v : down) v = rng();
    const std::vector<uint16_t> gate_up_scale =
        ToBf16(Normal(rng, s.experts * 2 * s.inner * s.hidden / 32, 0.02f));
    const std::vector<uint16_t> down_scale = ToBf16(Normal(rng, s.experts * s.hidden * s.inner / 32, 0.02f));
    std::vector<int32_t> ids;
    for (int64_t r = 0; r < s.rows; ++r) {
      std::vector<int32_t> order(all);
      for (int64_t i = 0; i < all; ++i) order[i] = static_cast<int32_t>(i);
      std::shuffle(order.begin(), order.end(), rng);
      order.resize(s.top_k);
      std::sort(order.begin(), order.end());
      ids.insert(ids.end(), order.begin(), order.end());
    }
    std::vector<float> weights = Normal(rng, s.rows * s.top_k);
    Twin x(rng, s.rows, s.hidden), out(rng, s.rows, s.hidden);
    Int4Experts host{s.experts,   s.first,          s.hidden, s.inner, gate_up.data(), gate_up_scale.data(),
                     down.data(), down_scale.data()};
    const OnGpu<uint32_t> g(gate_up), d(down);
    const OnGpu<uint16_t> gs(gate_up_scale), ds(down_scale);
    const OnGpu<int32_t> device_ids(ids);
    const OnGpu<float> device_weights(weights);
    Int4Experts device{s.experts, s.first, s.hidden, s.inner, g.data(), gs.data(), d.data(), ds.data()};
    for (const bool accumulate : {false, true}) {
      REQUIRE(Cpu().Moe({x.cpu(), host, ids.data(), weights.data(), s.top_k, out.cpu(), accumulate}).ok());
      REQUIRE(Gpu()
                  ->Moe({x.gpu(), device, device_ids.data(), device_weights.data(), s.top_k, out.gpu(),
                         accumulate})
                  .ok());
      CHECK(RelativeError(out.FromGpu(), out.host) < 8e-3);
    }
  }
}

}  // namespace
}  // namespace kdt::kernels::test
