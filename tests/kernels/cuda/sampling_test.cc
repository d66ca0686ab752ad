// Logits statistics, the keyed draw, the tree walk and the drafter's attention against the CPU.
#include "tests/kernels/cuda/util.h"

namespace kdt::kernels::test {
namespace {

TEST_CASE("cuda: logits_top_k gives the CPU's ids and statistics, ties and broken rows included") {
  KDT_NEED_GPU();
  std::mt19937 rng(9);
  for (const int64_t vocab : {5, 64, 1000, 20480}) {
    const int64_t rows = 6, k = std::min<int64_t>(vocab, 64);
    std::normal_distribution<float> normal(0.0f, 3.0f);
    std::vector<float> logits(rows * vocab);
    for (float& v : logits) v = normal(rng);
    for (int64_t i = 0; i < vocab; ++i) logits[vocab + i] = static_cast<float>(i % 3);  // ties
    for (int64_t i = 0; i < vocab; ++i) logits[2 * vocab + i] = i % 2 == 0 ? 0.0f : -0.0f;
    logits[3 * vocab + 2] = std::nanf("");
    logits[4 * vocab + 1] = -INFINITY;
    std::vector<float> max(rows), sum(rows), values(rows * k);
    std::vector<uint8_t> bad(rows);
    std::vector<int32_t> ids(rows * k);
    const Tensor host = MakeTensor(logits.data(), DType::kF32, rows, vocab);
    REQUIRE(
        Cpu().LogitsTopK({host, 70, k, max.data(), sum.data(), bad.data(), ids.data(), values.data()}).ok());
    const OnGpu<float> device(logits);
    const Tensor on_gpu = MakeTensor(device.data(), DType::kF32, rows, vocab);
    OnGpu<float> gpu_max(rows, 0xff), gpu_sum(rows, 0xff), gpu_values(rows * k, 0xff);
    OnGpu<uint8_t> gpu_bad(rows, 0xff);
    OnGpu<int32_t> gpu_ids(rows * k, 0xff);
    REQUIRE(Gpu()
                ->LogitsTopK({on_gpu, 70, k, gpu_max.data(), gpu_sum.data(), gpu_bad.data(), gpu_ids.data(),
                              gpu_values.data()})
                .ok());
    CHECK(gpu_ids.Get() == ids);
    CHECK(gpu_values.Get() == values);
    CHECK(gpu_bad.Get() == bad);
    CHECK(gpu_max.Get() == max);
    std::vector<float> got = gpu_sum.Get();
    got[3] = sum[3] = 0.0f;  // a NaN row's sum says nothing
    CHECK(RelativeError(got, sum) < 1e-5);
  }
}

TEST_CASE("cuda: scale_rows gives the CPU's bits") {
  KDT_NEED_GPU();
  std::mt19937 rng(12);
  const int64_t rows = 3, cols = 5003;
  std::normal_distribution<float> normal(0.0f, 3.0f);
  std::vector<float> values(rows * cols);
  for (float& v : values) v = normal(rng);
  const std::vector<float> factor = {0.7f, 1.0f, 1.0f / 0.3f};
  const OnGpu<float> device(values), device_factor(factor);
  REQUIRE(Cpu().ScaleRows({MakeTensor(values.data(), DType::kF32, rows, cols), factor.data()}).ok());
  REQUIRE(Gpu()->ScaleRows({MakeTensor(device.data(), DType::kF32, rows, cols), device_factor.data()}).ok());
  CHECK(device.Get() == values);
}

TEST_CASE("cuda: gumbel_argmax gives the CPU's choice and value, bit for bit") {
  KDT_NEED_GPU();
  std::mt19937 rng(10);
  const int64_t rows = 40, vocab = 5003;
  std::normal_distribution<float> normal(0.0f, 2.0f);
  std::vector<float> logits(rows * vocab), temperature(rows);
  std::vector<uint64_t> seed(rows);
  std::vector<int64_t> position(rows);
  for (float& v : logits) v = normal(rng);
  for (int64_t r = 0; r < rows; ++r) {
    temperature[r] = r % 4 == 0 ? 0.0f : 0.3f * static_cast<float>(r % 7 + 1);
    seed[r] = static_cast<uint64_t>(rng()) << 32 | rng();
    position[r] = static_cast<int64_t>(rng()) << 8;
  }
  for (int64_t i = 0; i < vocab; ++i) logits[5 * vocab + i] = -INFINITY;
  for (int64_t i = 0; i < vocab; ++i)
    logits[4 * vocab + i] = 1.0f;  // temperature 0, all equal: the lowest id
  std::vector<int32_t> ids(rows);
  std::vector<float> values(rows);
  logits[7 * vocab + 11] = std::nanf("");
  logits[8 * vocab + vocab - 1] = INFINITY;
  std::vector<int32_t> bad(rows);
  const int64_t begin = 20481;  // not a multiple of four
  REQUIRE(Cpu()
              .GumbelArgmax({MakeTensor(logits.data(), DType::kF32, rows, vocab), begin, temperature.data(),
                             seed.data(), position.data(), ids.data(), values.data(), bad.data()})
              .ok());
  CHECK(std::count(bad.begin(), bad.end(), 1) == 3);
  const OnGpu<float> device(logits), gpu_temperature(temperature);
  const OnGpu<uint64_t> gpu_seed(seed);
  const OnGpu<int64_t> gpu_position(position);
  OnGpu<int32_t> gpu_ids(rows, 0xff), gpu_bad(rows, 0xff);
  OnGpu<float> gpu_values(rows, 0xff);
  REQUIRE(Gpu()
              ->GumbelArgmax({MakeTensor(device.data(), DType::kF32, rows, vocab), begin,
                              gpu_temperature.data(), gpu_seed.data(), gpu_position.data(), gpu_ids.data(),
                              gpu_values.data(), gpu_bad.data()})
              .ok());
  CHECK(gpu_bad.Get() == bad);
  CHECK(gpu_ids.Get() == ids);
  const std::vector<float> got = gpu_values.Get();
  CHECK(std::memcmp(got.data(), values.data(), rows * sizeof(float)) == 0);
}

TEST_CASE("cuda: tree_walk follows the CPU's path") {
  KDT_NEED_GPU();
  std::mt19937 rng(11);
  std::vector<int32_t> begin = {0}, tokens, parents, targets;
  for (const int nodes : {1, 2, 33, 64, 256}) {
    for (int i = 0; i < nodes; ++i) {
      tokens.push_back(static_cast<int32_t>(rng() % 4));
      parents.push_back(i == 0 ? -1 : static_cast<int32_t>(i < 40 ? rng() % i : i - 1));
      targets.push_back(static_cast<int32_t>(rng() % 9 == 0 ? -1 : rng() % 4));
    }
    begin.push_back(begin.back() + nodes);
  }
  const int64_t trees = static_cast<int64_t>(begin.size()) - 1, rows = begin.back();
  std::vector<int32_t> length(trees), path(rows, -7), root(trees);
  REQUIRE(Cpu()
              .TreeWalk({trees, begin.data(), tokens.data(), parents.data(), targets.data(), length.data(),
                         path.data(), root.data()})
              .ok());
  const OnGpu<int32_t> a(begin), b(tokens), c(parents), d(targets);
  OnGpu<int32_t> gpu_length(trees, 0xff), gpu_path(std::vector<int32_t>(rows, -7)), gpu_root(trees, 0xff);
  REQUIRE(Gpu()
              ->TreeWalk({trees, a.data(), b.data(), c.data(), d.data(), gpu_length.data(), gpu_path.data(),
                          gpu_root.data()})
              .ok());
  CHECK(gpu_length.Get() == length);
  CHECK(gpu_path.Get() == path);
  CHECK(gpu_root.Get() == root);
}

TEST_CASE("cuda: draft attention against the CPU") {
  KDT_NEED_GPU();
  std::mt19937 rng(12);
  struct Shape {
    int64_t heads, kv_heads, dim, block;
  };
  for (const Shape shape : {Shape{8, 1, 128, 8}, Shape{8, 2, 128, 8}, Shape{1, 1, 64, 8}, Shape{4, 4, 32, 3},
                            Shape{32, 2, 64, 16}}) {
    const auto [heads, kv_heads, dim, block] = shape;
    const int64_t sequences = 4, slots = 900, stride = 3000;
    Twin q(rng, sequences * block, heads * dim), k(rng, sequences * block, kv_heads * dim),
        v(rng, sequences * block, kv_heads * dim);
    Twin pool(rng, slots, 2 * kv_heads * dim), out(rng, sequences * block, heads * dim);
    const std::vector<int32_t> context = {0, 2900, 333, 17}, window = {0, 0, 300, 0};
    std::vector<int32_t> table(sequences * stride);
    for (int32_t& slot : table) slot = static_cast<int32_t>(rng() % slots);
    DraftAttentionArgs args{q.cpu(),        k.cpu(),       v.cpu(),      pool.cpu(), heads,
                            kv_heads,       dim,           block,        0.088f,     sequences,
                            context.data(), window.data(), table.data(), stride,     out.cpu()};
    REQUIRE(Cpu().DraftAttention(args).ok());
    const OnGpu<int32_t> a(context), b(window), c(table);
    DraftAttentionArgs on_gpu{q.gpu(), k.gpu(),   v.gpu(),  pool.gpu(), heads,    kv_heads, dim,      block,
                              0.088f,  sequences, a.data(), b.data(),   c.data(), stride,   out.gpu()};
    for (int repeat = 0; repeat < 2; ++repeat) {
      REQUIRE(Gpu()->DraftAttention(on_gpu).ok());
      CHECK(RelativeError(out.FromGpu(), out.host) < 4e-3);
    }
  }
}

}  // namespace
}  // namespace kdt::kernels::test
