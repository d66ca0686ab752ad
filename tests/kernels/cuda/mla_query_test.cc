#include <algorithm>
#include <numeric>

#include "tests/kernels/cuda/util.h"

namespace kdt::kernels::test {
namespace {

struct Widths {
  int64_t q_lora, heads, latent, rope, nope, v;
};
constexpr Widths kFullSize{1536, 8, 512, 64, 128, 128};

// One layer's inputs on both sides.
struct Case {
  Case(std::mt19937& rng, int64_t rows_in, const Widths& widths)
      : w(widths),
        rows(rows_in),
        qkv(rng, rows, w.q_lora + w.latent + w.rope),
        q_norm(rng, 1, w.q_lora),
        kv_norm(rng, 1, w.latent),
        w_q_b(rng, w.heads * (w.nope + w.rope), w.q_lora, 0.03f),
        w_kv_b(rng, w.heads * (w.nope + w.v), w.latent, 0.05f),
        slots(rows),
        positions(rows),
        inv_freq(w.rope / 2),
        device_slots(rows, 0),
        device_positions(rows, 0),
        device_freq(inv_freq.size(), 0) {
    std::iota(slots.begin(), slots.end(), 2);
    std::shuffle(slots.begin(), slots.end(), rng);
    if (rows > 2) slots[1] = -1;
    for (int64_t r = 0; r < rows; ++r) positions[r] = static_cast<int32_t>(r * 509);
    for (size_t i = 0; i < inv_freq.size(); ++i)
      inv_freq[i] = std::pow(50000.0f, -static_cast<float>(i) / static_cast<float>(inv_freq.size()));
    device_slots.Set(slots);
    device_positions.Set(positions);
    device_freq.Set(inv_freq);
  }

  Widths w;
  int64_t rows;
  Twin qkv, q_norm, kv_norm, w_q_b, w_kv_b;
  std::vector<int32_t> slots, positions;
  std::vector<float> inv_freq;
  OnGpu<int32_t> device_slots, device_positions;
  OnGpu<float> device_freq;
};

struct Results {
  Results(int64_t rows, const Widths& w)
      : pool(std::vector<float>((rows + 4) * (w.latent + w.rope), 0.5f), rows + 4, w.latent + w.rope),
        q(std::vector<float>(rows * w.heads * (w.nope + w.rope)), rows, w.heads * (w.nope + w.rope)),
        out(std::vector<float>(rows * w.heads * (w.latent + w.rope)), rows, w.heads * (w.latent + w.rope)) {}
  Twin pool, q, out;
};

// Rows first .. first + rows - 1 of the case.
MlaQueryArgs OnDevice(Case& c, Results& to, int64_t first, int64_t rows) {
  const Widths& w = c.w;
  const int32_t* const positions = c.device_positions.data() + first;
  return {{c.qkv.gpu().Rows(first, rows), w.q_lora, w.latent, w.rope, c.q_norm.device.data(),
           c.kv_norm.device.data(), 1e-6f, positions, c.device_freq.data(), 1.25f,
           c.device_slots.data() + first, to.pool.gpu()},
          c.w_q_b.gpu(),
          {to.q.gpu().Rows(first, rows), c.w_kv_b.gpu().bf16(), w.heads, w.nope, w.rope, w.v, w.latent,
           to.out.gpu().Rows(first, rows), positions, c.device_freq.data(), 1.25f}};
}
MlaQueryArgs OnHost(Case& c, Results& to) {
  const Widths& w = c.w;
  return {{c.qkv.cpu(), w.q_lora, w.latent, w.rope, c.q_norm.bits.data(), c.kv_norm.bits.data(), 1e-6f,
           c.positions.data(), c.inv_freq.data(), 1.25f, c.slots.data(), to.pool.cpu()},
          c.w_q_b.cpu_bf16(),
          {to.q.cpu(), c.w_kv_b.bits.data(), w.heads, w.nope, w.rope, w.v, w.latent, to.out.cpu(),
           c.positions.data(), c.inv_freq.data(), 1.25f}};
}

TEST_CASE("cuda: mla_query against the CPU's three ops") {
  KDT_NEED_GPU();
  std::mt19937 rng(41);
  // In the fourth blocks have rope outputs and columns. The last two are not the kernel's.
  for (const Widths& widths : {kFullSize, Widths{512, 3, 512, 64, 128, 128}, Widths{256, 5, 256, 32, 64, 64},
                               Widths{256, 3, 512, 64, 64, 64}, Widths{192, 2, 512, 64, 128, 128},
                               Widths{256, 2, 512, 16, 32, 32}}) {
    for (const int64_t rows : {1, 3, 8, 13, 16, 32, 41, 64, 70}) {
      CAPTURE(widths.q_lora, widths.heads, rows);
      Case c(rng, rows, widths);
      Results r(rows, widths);
      REQUIRE(Cpu().MlaQuery(OnHost(c, r)).ok());
      for (int run = 0; run < 2; ++run) {  // the second finds what the first left in the workspace
        c.qkv.device.Set(c.qkv.bits);
        REQUIRE(Gpu()->MlaQuery(OnDevice(c, r, 0, rows)).ok());
        CHECK(RelativeError(r.out.FromGpu(), r.out.host) < 6e-3);
        CHECK(RelativeError(r.pool.FromGpu(), r.pool.host) < 6e-3);
      }
    }
  }
}

TEST_CASE("cuda: a row of mla_query has the same bits alone and among others") {
  KDT_NEED_GPU();
  std::mt19937 rng(42);
  Case c(rng, 64, kFullSize);
  Results all(64, kFullSize), some(64, kFullSize);
  REQUIRE(Gpu()->MlaQuery(OnDevice(c, all, 0, 64)).ok());
  for (const auto& [first, rows] : {std::pair<int64_t, int64_t>{0, 1}, {1, 7}, {8, 12}, {20, 1}, {21, 43}}) {
    c.qkv.device.Set(c.qkv.bits);
    REQUIRE(Gpu()->MlaQuery(OnDevice(c, some, first, rows)).ok());
  }
  CHECK(all.out.device.Get() == some.out.device.Get());
  CHECK(all.pool.device.Get() == some.pool.device.Get());
}

}  // namespace
}  // namespace kdt::kernels::test
