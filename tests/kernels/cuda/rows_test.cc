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

TEST_CASE("cuda: embedding gathers rows of activations; table_write writes what has an index") {
  KDT_NEED_GPU();
  std::mt19937 rng(1);
  Twin table(rng, 20, 96), out(rng, 3, 96);
  const std::vector<int32_t> rows = {19, 0, 19};
  const OnGpu<int32_t> device_rows(rows);
  REQUIRE(Cpu().Embedding({rows.data(), 0, table.cpu(), out.cpu()}).ok());
  REQUIRE(Gpu()->Embedding({device_rows.data(), 0, table.gpu(), out.gpu()}).ok());
  CHECK(out.FromGpu() == out.host);
  const OnGpu<float> wide(table.host), wide_out(3 * 96, 0xff);
  REQUIRE(Gpu()
              ->Embedding({device_rows.data(), 0, MakeTensor(wide.data(), DType::kF32, 20, 96),
                           MakeTensor(wide_out.data(), DType::kF32, 3, 96)})
              .ok());
  CHECK(wide_out.Get() == out.host);

  std::vector<int32_t> expected(1000, 7);
  const OnGpu<int32_t> written(expected);
  std::vector<int64_t> index(300);
  std::vector<int32_t> value(300);
  for (int i = 0; i < 300; ++i) {
    index[i] = i % 3 == 0 ? -1 : 3 * i;
    value[i] = i;
    if (index[i] >= 0) expected[index[i]] = i;
  }
  const OnGpu<int64_t> device_index(index);
  const OnGpu<int32_t> device_value(value);
  REQUIRE(Gpu()->TableWrite({device_index.data(), device_value.data(), 300, written.data()}).ok());
  CHECK(written.Get() == expected);
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

// Whole chunks in registers (one, two and four a thread), rows apart from each other, and widths that take
// two passes.
TEST_CASE("cuda: rms_norm of any width and stride, float32 in and bf16 out") {
  KDT_NEED_GPU();
  std::mt19937 rng(21);
  for (const int64_t n : {8, 128, 200, 1536, 7168, 8200, 16384, 16392, 60, 7161}) {
    const int64_t wide = n + 24;
    Twin x(rng, 3, wide), residual(rng, 3, wide), weight(rng, 1, n), out(rng, 3, wide);
    const OnGpu<uint16_t> w(weight.bits);
    const std::vector<float> out_before = out.host, residual_before = residual.host;
    REQUIRE(Cpu()
                .RmsNorm({x.cpu().Columns(8, n), residual.cpu().Columns(8, n), weight.bits.data(), 1e-5f,
                          out.cpu().Columns(16, n)})
                .ok());
    REQUIRE(Gpu()
                ->RmsNorm({x.gpu().Columns(8, n), residual.gpu().Columns(8, n), w.data(), 1e-5f,
                           out.gpu().Columns(16, n)})
                .ok());
    INFO("width " << n);
    const std::vector<float> got = out.FromGpu(), sums = residual.FromGpu();
    CHECK(RelativeError(got, out.host) < 2 * kBf16Error);
    CHECK(RelativeError(sums, residual.host) < kBf16Error);
    for (int64_t r = 0; r < 3; ++r) {
      for (int64_t c = 0; c < wide; ++c) {
        if (c < 16 || c >= 16 + n) REQUIRE(got[r * wide + c] == out_before[r * wide + c]);
        if (c < 8 || c >= 8 + n) REQUIRE(sums[r * wide + c] == residual_before[r * wide + c]);
      }
    }

    std::vector<float> features(3 * n);
    std::normal_distribution<float> normal(0.0f, 3.0f);
    for (float& f : features) f = normal(rng);
    const OnGpu<float> device_features(features);
    Twin narrow(rng, 3, n);
    REQUIRE(
        Cpu()
            .RmsNorm(
                {MakeTensor(features.data(), DType::kF32, 3, n), {}, weight.bits.data(), 1e-5f, narrow.cpu()})
            .ok());
    REQUIRE(
        Gpu()
            ->RmsNorm(
                {MakeTensor(device_features.data(), DType::kF32, 3, n), {}, w.data(), 1e-5f, narrow.gpu()})
            .ok());
    CHECK(RelativeError(narrow.FromGpu(), narrow.host) < kBf16Error);
  }
}

TEST_CASE("cuda: mla_prepare norms, rotates and writes; padding writes nothing") {
  KDT_NEED_GPU();
  std::mt19937 rng(22);
  std::vector<float> inv_freq(32);
  for (int i = 0; i < 32; ++i) inv_freq[i] = std::pow(50000.0f, -static_cast<float>(i) / 32.0f);
  const OnGpu<float> device_freq(inv_freq);
  const std::vector<int32_t> positions = {0, 7, 262143, 4095, 4096}, slots = {5, -1, 0, 8, 3};
  const OnGpu<int32_t> device_positions(positions), device_slots(slots);
  for (const int64_t q_lora : {1536, 192}) {
    Twin qkv(rng, 5, q_lora + 576), pool(rng, 9, 576), q_norm(rng, 1, q_lora), kv_norm(rng, 1, 512);
    const OnGpu<uint16_t> device_q_norm(q_norm.bits), device_kv_norm(kv_norm.bits);
    const std::vector<float> pool_before = pool.host;
    REQUIRE(Cpu()
                .MlaPrepare({qkv.cpu(), q_lora, 512, 64, q_norm.bits.data(), kv_norm.bits.data(), 1e-6f,
                             positions.data(), inv_freq.data(), 1.25f, slots.data(), pool.cpu()})
                .ok());
    REQUIRE(Gpu()
                ->MlaPrepare({qkv.gpu(), q_lora, 512, 64, device_q_norm.data(), device_kv_norm.data(), 1e-6f,
                              device_positions.data(), device_freq.data(), 1.25f, device_slots.data(),
                              pool.gpu()})
                .ok());
    const std::vector<float> got = qkv.FromGpu(), written = pool.FromGpu();
    std::vector<float> q, expected_q;
    for (int64_t r = 0; r < 5; ++r) {
      q.insert(q.end(), got.begin() + r * qkv.cols, got.begin() + r * qkv.cols + q_lora);
      expected_q.insert(expected_q.end(), qkv.host.begin() + r * qkv.cols,
                        qkv.host.begin() + r * qkv.cols + q_lora);
    }
    CHECK(RelativeError(q, expected_q) < kBf16Error);
    CHECK(RelativeError(written, pool.host) < kBf16Error);
    for (const int64_t free_slot : {1, 2, 4, 6, 7}) {
      CHECK(std::equal(written.begin() + free_slot * 576, written.begin() + (free_slot + 1) * 576,
                       pool_before.begin() + free_slot * 576));
    }
  }
}

TEST_CASE("cuda: draft_prepare of a block and of context rows in several layers") {
  KDT_NEED_GPU();
  std::mt19937 rng(23);
  const std::vector<int32_t> positions = {0, 7, 262143, 4095, 4096}, slots = {5, -1, 0, 8, 3};
  const OnGpu<int32_t> device_positions(positions), device_slots(slots);
  struct Shape {
    int64_t heads, kv_heads, dim, layers;
  };
  for (const Shape s : {Shape{8, 1, 128, 6}, Shape{4, 2, 64, 3}, Shape{16, 8, 16, 40}, Shape{2, 2, 256, 1}}) {
    const int64_t width = s.kv_heads * s.dim;
    INFO("dim " << s.dim);
    std::vector<float> inv_freq(s.dim / 2);
    for (size_t i = 0; i < inv_freq.size(); ++i)
      inv_freq[i] = std::pow(50000.0f, -static_cast<float>(i) / static_cast<float>(inv_freq.size()));
    const OnGpu<float> device_freq(inv_freq);
    Twin q_norm(rng, 1, s.dim), k_norm(rng, s.layers, s.dim);
    const OnGpu<uint16_t> device_q_norm(q_norm.bits), device_k_norm(k_norm.bits);
    std::vector<const uint16_t*> k_norms(s.layers), device_k_norms(s.layers);
    for (int64_t l = 0; l < s.layers; ++l) {
      k_norms[l] = k_norm.bits.data() + l * s.dim;
      device_k_norms[l] = device_k_norm.data() + l * s.dim;
    }

    Twin q(rng, 5, s.heads * s.dim), block(rng, 5, 2 * width);
    REQUIRE(Cpu()
                .DraftPrepare({q.cpu(), block.cpu(), s.heads, s.kv_heads, s.dim, 1, q_norm.bits.data(),
                               k_norms.data(), 1e-5f, positions.data(), inv_freq.data(), 1.25f})
                .ok());
    REQUIRE(
        Gpu()
            ->DraftPrepare({q.gpu(), block.gpu(), s.heads, s.kv_heads, s.dim, 1, device_q_norm.data(),
                            device_k_norms.data(), 1e-5f, device_positions.data(), device_freq.data(), 1.25f})
            .ok());
    CHECK(RelativeError(q.FromGpu(), q.host) < kBf16Error);
    CHECK(RelativeError(block.FromGpu(), block.host) < kBf16Error);

    Twin kv(rng, 5, s.layers * 2 * width), pools(rng, s.layers, 9 * 2 * width);
    const std::vector<float> before = pools.host;
    REQUIRE(Cpu()
                .DraftPrepare({{},
                               kv.cpu(),
                               s.heads,
                               s.kv_heads,
                               s.dim,
                               s.layers,
                               nullptr,
                               k_norms.data(),
                               1e-5f,
                               positions.data(),
                               inv_freq.data(),
                               1.25f,
                               slots.data(),
                               MakeTensor(pools.host.data(), DType::kF32, 9, 2 * width),
                               9 * 2 * width})
                .ok());
    REQUIRE(Gpu()
                ->DraftPrepare({{},
                                kv.gpu(),
                                s.heads,
                                s.kv_heads,
                                s.dim,
                                s.layers,
                                nullptr,
                                device_k_norms.data(),
                                1e-5f,
                                device_positions.data(),
                                device_freq.data(),
                                1.25f,
                                device_slots.data(),
                                MakeTensor(pools.device.data(), DType::kBF16, 9, 2 * width),
                                9 * 2 * width})
                .ok());
    const std::vector<float> written = pools.FromGpu();
    CHECK(RelativeError(written, pools.host) < kBf16Error);
    for (int64_t l = 0; l < s.layers; ++l) {
      for (const int64_t free_slot : {1, 2, 4, 6, 7}) {
        const int64_t at = (l * 9 + free_slot) * 2 * width;
        REQUIRE(std::equal(written.begin() + at, written.begin() + at + 2 * width, before.begin() + at));
      }
    }
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
