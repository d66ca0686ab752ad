// The ops that work row by row: embedding, norms, rope, silu, writes and moves in the pool.
#include "tests/kernels/cuda/util.h"

namespace kdt::kernels::test {
namespace {

constexpr double kBf16Error = 4e-3;  // a rounding or two to bf16

TEST_CASE("cuda: embedding copies this rank's rows and zeroes the others") {
  KDT_NEED_GPU();
  std::mt19937 rng(1);
  Twin table(rng, 20, 96), out(rng, 5, 96);
  const std::vector<int32_t> ids = {103, 100, 99, 119, 120};
  const OnGpu<int32_t> device_ids(ids);
  REQUIRE(Cpu().Embedding({ids.data(), 100, table.cpu_bf16(), out.cpu()}).ok());
  REQUIRE(Gpu()->Embedding({device_ids.data(), 100, table.gpu(), out.gpu()}).ok());
  CHECK(out.FromGpu() == out.host);
}

TEST_CASE("cuda: rms_norm with and without residual, add, silu_mul") {
  KDT_NEED_GPU();
  std::mt19937 rng(2);
  for (const int64_t n : {64, 512, 7168}) {
    Twin x(rng, 7, n), residual(rng, 7, n), weight(rng, 1, n), out(rng, 7, n), plain(rng, 7, n);
    const OnGpu<uint16_t> w(weight.bits);
    REQUIRE(Cpu().RmsNorm({x.cpu(), residual.cpu(), weight.bits.data(), 1e-5f, out.cpu()}).ok());
    REQUIRE(Gpu()->RmsNorm({x.gpu(), residual.gpu(), w.data(), 1e-5f, out.gpu()}).ok());
    CHECK(RelativeError(residual.FromGpu(), residual.host) < kBf16Error);
    CHECK(RelativeError(out.FromGpu(), out.host) < 2 * kBf16Error);
    REQUIRE(Cpu().RmsNorm({x.cpu(), Tensor{}, weight.bits.data(), 1e-5f, plain.cpu()}).ok());
    REQUIRE(Gpu()->RmsNorm({x.gpu(), Tensor{}, w.data(), 1e-5f, plain.gpu()}).ok());
    CHECK(RelativeError(plain.FromGpu(), plain.host) < kBf16Error);

    // float32 in, bf16 out.
    const OnGpu<float> wide(x.host);
    REQUIRE(Gpu()
                ->RmsNorm({MakeTensor(wide.data(), DType::kF32, 7, n), Tensor{}, w.data(), 1e-5f, out.gpu()})
                .ok());
    CHECK(RelativeError(out.FromGpu(), plain.host) < kBf16Error);

    Twin sum(rng, 7, n), gate_up(rng, 7, 2 * n), activated(rng, 7, n);
    REQUIRE(Cpu().Add({x.cpu(), sum.cpu()}).ok());
    REQUIRE(Gpu()->Add({x.gpu(), sum.gpu()}).ok());
    CHECK(RelativeError(sum.FromGpu(), sum.host) < kBf16Error);
    REQUIRE(Cpu().SiluMul({gate_up.cpu(), activated.cpu()}).ok());
    REQUIRE(Gpu()->SiluMul({gate_up.gpu(), activated.gpu()}).ok());
    CHECK(RelativeError(activated.FromGpu(), activated.host) < kBf16Error);
  }
}

TEST_CASE("cuda: rope in both layouts, at positions up to 262143") {
  KDT_NEED_GPU();
  std::mt19937 rng(3);
  const std::vector<int32_t> positions = {0, 1, 77, 65535, 262143};
  const OnGpu<int32_t> device_positions(positions);
  std::vector<float> inv_freq(32);
  for (int i = 0; i < 32; ++i) inv_freq[i] = std::pow(50000.0f, -static_cast<float>(i) / 32.0f);
  const OnGpu<float> device_freq(inv_freq);
  for (const RopeLayout layout : {RopeLayout::kInterleaved, RopeLayout::kHalfSplit}) {
    Twin x(rng, 5, 3 * 192);
    REQUIRE(Cpu().Rope({x.cpu(), 3, 192, 128, 64, positions.data(), inv_freq.data(), 1.25f, layout}).ok());
    REQUIRE(Gpu()
                ->Rope({x.gpu(), 3, 192, 128, 64, device_positions.data(), device_freq.data(), 1.25f, layout})
                .ok());
    CHECK(RelativeError(x.FromGpu(), x.host) < kBf16Error);
  }
}

TEST_CASE("cuda: kv_write writes rows with a slot and no others; kv_move is the in-order copy") {
  KDT_NEED_GPU();
  std::mt19937 rng(4);
  Twin x(rng, 4, 576), pool(rng, 64, 576);
  const std::vector<int32_t> slots = {9, -1, 63, 0};
  const OnGpu<int32_t> device_slots(slots);
  REQUIRE(Cpu().KvWrite({x.cpu(), slots.data(), pool.cpu()}).ok());
  REQUIRE(Gpu()->KvWrite({x.gpu(), device_slots.data(), pool.gpu()}).ok());
  CHECK(pool.FromGpu() == pool.host);

  // Two layers of 32 slots; a commit whose sources overlap its targets, longer than a batch of the kernel.
  std::vector<int32_t> from, to;
  for (int i = 0; i < 13; ++i) {
    from.push_back(5 + 2 * i);
    to.push_back(5 + i);
  }
  const OnGpu<int32_t> device_from(from), device_to(to);
  Tensor cpu = pool.cpu().Rows(0, 32), gpu = pool.gpu().Rows(0, 32);
  REQUIRE(Cpu().KvMove({from.data(), to.data(), 13, cpu, 2, 32 * 576}).ok());
  REQUIRE(Gpu()->KvMove({device_from.data(), device_to.data(), 13, gpu, 2, 32 * 576}).ok());
  CHECK(pool.FromGpu() == pool.host);
}

}  // namespace
}  // namespace kdt::kernels::test
