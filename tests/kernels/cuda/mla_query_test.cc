#include <algorithm>
#include <numeric>

#include "tests/kernels/cuda/util.h"

namespace kdt::kernels::test {
namespace {

constexpr int64_t kLatent = 512, kRope = 64, kNope = 128, kV = 128;

// One layer's inputs on both sides; the weights of `heads` heads.
struct Case {
  Case(std::mt19937& rng, int64_t rows_in, int64_t q_lora_in, int64_t heads_in)
      : rows(rows_in),
        q_lora(q_lora_in),
        heads(heads_in),
        qkv(rng, rows, q_lora + kLatent + kRope),
        q_norm(rng, 1, q_lora),
        kv_norm(rng, 1, kLatent),
        w_q_b(rng, heads * (kNope + kRope), q_lora, 0.03f),
        w_kv_b(rng, heads * (kNope + kV), kLatent, 0.05f),
        slots(rows),
        device_slots(rows, 0) {
    std::iota(slots.begin(), slots.end(), 2);
    std::shuffle(slots.begin(), slots.end(), rng);
    if (rows > 2) slots[1] = -1;
    device_slots.Set(slots);
  }

  int64_t rows, q_lora, heads;
  Twin qkv, q_norm, kv_norm, w_q_b, w_kv_b;
  std::vector<int32_t> slots;
  OnGpu<int32_t> device_slots;
};

struct Angles {
  Angles() : inv_freq(kRope / 2), positions(512), device_freq(kRope / 2, 0), device_positions(512, 0) {
    for (size_t i = 0; i < inv_freq.size(); ++i)
      inv_freq[i] = std::pow(50000.0f, -static_cast<float>(i) / static_cast<float>(inv_freq.size()));
    for (size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<int32_t>(i * 509);
    device_freq.Set(inv_freq);
    device_positions.Set(positions);
  }
  std::vector<float> inv_freq;
  std::vector<int32_t> positions;
  OnGpu<float> device_freq;
  OnGpu<int32_t> device_positions;
};

struct Results {
  Results(int64_t rows, int64_t heads)
      : pool(std::vector<float>((rows + 4) * (kLatent + kRope), 0.5f), rows + 4, kLatent + kRope),
        q(std::vector<float>(rows * heads * (kNope + kRope)), rows, heads * (kNope + kRope)),
        out(std::vector<float>(rows * heads * (kLatent + kRope)), rows, heads * (kLatent + kRope)) {}
  Twin pool, q, out;
};

// Rows first .. first + rows - 1 of the case.
MlaQueryArgs OnDevice(Case& c, const Angles& angles, Results& to, int64_t first, int64_t rows) {
  const int32_t* const positions = angles.device_positions.data() + first;
  return {{c.qkv.gpu().Rows(first, rows), c.q_lora, kLatent, kRope, c.q_norm.device.data(),
           c.kv_norm.device.data(), 1e-6f, positions, angles.device_freq.data(), 1.25f,
           c.device_slots.data() + first, to.pool.gpu()},
          c.w_q_b.gpu(),
          {to.q.gpu().Rows(first, rows), c.w_kv_b.gpu().bf16(), c.heads, kNope, kRope, kV, kLatent,
           to.out.gpu().Rows(first, rows), positions, angles.device_freq.data(), 1.25f}};
}

TEST_CASE("cuda: mla_query against the CPU's three ops") {
  KDT_NEED_GPU();
  std::mt19937 rng(41);
  const Angles angles;
  for (const auto& [q_lora, heads] : {std::pair<int64_t, int64_t>{1536, 8}, {512, 3}, {192, 2}}) {
    for (const int64_t rows : {1, 3, 8, 13, 16, 32, 41, 64, 70}) {
      CAPTURE(q_lora, rows);
      Case c(rng, rows, q_lora, heads);
      Results r(rows, heads);
      REQUIRE(Cpu()
                  .MlaQuery({{c.qkv.cpu(), q_lora, kLatent, kRope, c.q_norm.bits.data(),
                              c.kv_norm.bits.data(), 1e-6f, angles.positions.data(), angles.inv_freq.data(),
                              1.25f, c.slots.data(), r.pool.cpu()},
                             c.w_q_b.cpu_bf16(),
                             {r.q.cpu(), c.w_kv_b.bits.data(), heads, kNope, kRope, kV, kLatent, r.out.cpu(),
                              angles.positions.data(), angles.inv_freq.data(), 1.25f}})
                  .ok());
      for (int run = 0; run < 2; ++run) {  // the second finds what the first left in the workspace
        c.qkv.device.Set(c.qkv.bits);
        REQUIRE(Gpu()->MlaQuery(OnDevice(c, angles, r, 0, rows)).ok());
        CHECK(RelativeError(r.out.FromGpu(), r.out.host) < 6e-3);
        CHECK(RelativeError(r.q.FromGpu(), r.q.host) < 6e-3);
        CHECK(RelativeError(r.pool.FromGpu(), r.pool.host) < 6e-3);
      }
    }
  }
}

TEST_CASE("cuda: a row of mla_query has the same bits alone and among others") {
  KDT_NEED_GPU();
  std::mt19937 rng(42);
  const Angles angles;
  Case c(rng, 64, 1536, 8);
  Results all(64, 8), some(64, 8);
  REQUIRE(Gpu()->MlaQuery(OnDevice(c, angles, all, 0, 64)).ok());
  for (const auto& [first, rows] : {std::pair<int64_t, int64_t>{0, 1}, {1, 7}, {8, 12}, {20, 1}, {21, 43}}) {
    c.qkv.device.Set(c.qkv.bits);
    REQUIRE(Gpu()->MlaQuery(OnDevice(c, angles, some, first, rows)).ok());
  }
  CHECK(all.out.device.Get() == some.out.device.Get());
  CHECK(all.pool.device.Get() == some.pool.device.Get());
}

}  // namespace
}  // namespace kdt::kernels::test
