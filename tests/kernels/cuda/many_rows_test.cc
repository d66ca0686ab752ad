// The ops of a step at the row counts of a full prefill step, in the shapes of a small model: grids,
// workspaces and counters that decoding never fills.
#include <numeric>

#include "tests/kernels/cuda/util.h"

namespace kdt::kernels::test {
namespace {

constexpr int64_t kHidden = 256, kHeads = 8, kNope = 32, kRope = 64, kValue = 32, kLatent = 512, kQLora = 192;

std::vector<int64_t> RowCounts() { return {160, 300, 512, 1000, 1024}; }

TEST_CASE("cuda: gemm at many rows") {
  KDT_NEED_GPU();
  std::mt19937 rng(21);
  struct Shape {
    int64_t outs, in;
    bool f32;
  };
  for (const Shape s : {Shape{kQLora + kLatent + kRope, kHidden, false}, Shape{kHeads * 96, kQLora, false},
                        Shape{kHidden, kHeads * kValue, false}, Shape{2048, kHidden, false},
                        Shape{kHidden, 1024, false}, Shape{512, kHidden, false}, Shape{4096, kHidden, true},
                        Shape{384, kHidden, false}, Shape{kHidden, 128, false}}) {
    Twin w(rng, s.outs, s.in, 0.1f);
    for (const int64_t rows : RowCounts()) {
      CAPTURE(s.outs, s.in, rows);
      Twin x(rng, rows, s.in), y(rng, rows, s.outs);
      REQUIRE(Cpu().Gemm({x.cpu(), w.cpu_bf16(), y.cpu()}).ok());
      if (s.f32) {
        OnGpu<float> out(rows * s.outs, 0xff);
        REQUIRE(Gpu()->Gemm({x.gpu(), w.gpu(), MakeTensor(out.data(), DType::kF32, rows, s.outs)}).ok());
        CHECK(RelativeError(out.Get(), y.host) < 1e-4);
      } else {
        REQUIRE(Gpu()->Gemm({x.gpu(), w.gpu(), y.gpu()}).ok());
        CHECK(RelativeError(y.FromGpu(), y.host) < 4e-3);
      }
    }
  }
}

TEST_CASE("cuda: absorbed projections at many rows") {
  KDT_NEED_GPU();
  std::mt19937 rng(22);
  for (const int64_t heads : {1, 4, 8}) {
    Twin w(rng, heads * (kNope + kValue), kLatent, 0.05f);
    for (const int64_t rows : RowCounts()) {
      CAPTURE(heads, rows);
      Twin q(rng, rows, heads * (kNope + kRope)), out(rng, rows, heads * (kLatent + kRope));
      REQUIRE(
          Cpu().AbsorbQuery({q.cpu(), w.bits.data(), heads, kNope, kRope, kValue, kLatent, out.cpu()}).ok());
      REQUIRE(Gpu()
                  ->AbsorbQuery({q.gpu(), w.gpu().bf16(), heads, kNope, kRope, kValue, kLatent, out.gpu()})
                  .ok());
      CHECK(RelativeError(out.FromGpu(), out.host) < 4e-3);
      Twin attended(rng, rows, heads * kLatent), value(rng, rows, heads * kValue);
      REQUIRE(Cpu()
                  .AbsorbValue({attended.cpu(), w.bits.data(), heads, kNope, kValue, kLatent, value.cpu()})
                  .ok());
      REQUIRE(Gpu()
                  ->AbsorbValue({attended.gpu(), w.gpu().bf16(), heads, kNope, kValue, kLatent, value.gpu()})
                  .ok());
      CHECK(RelativeError(value.FromGpu(), value.host) < 4e-3);
    }
  }
}

TEST_CASE("cuda: router and experts at many rows") {
  KDT_NEED_GPU();
  std::mt19937 rng(23);
  constexpr int64_t kExperts = 16, kTopK = 4;
  for (const int64_t inner : {32, 128, 256}) {
    std::vector<uint32_t> gate_up(kExperts * 2 * inner * kHidden / 8), down(kExperts * kHidden * inner / 8);
    for (uint32_t& v : gate_up) v = static_cast<uint32_t>(rng());
    for (uint32_t& v : down) v = static_cast<uint32_t>(rng());
    const std::vector<uint16_t> gs = ToBf16(Normal(rng, kExperts * 2 * inner * kHidden / 32, 0.02f));
    const std::vector<uint16_t> ds = ToBf16(Normal(rng, kExperts * kHidden * inner / 32, 0.02f));
    const Int4Experts host{kExperts, 0, kHidden, inner, gate_up.data(), gs.data(), down.data(), ds.data()};
    const OnGpu<uint32_t> device_gate_up(gate_up), device_down(down);
    const OnGpu<uint16_t> device_gs(gs), device_ds(ds);
    const Int4Experts device{
        kExperts,        0, kHidden, inner, device_gate_up.data(), device_gs.data(), device_down.data(),
        device_ds.data()};
    REQUIRE(Gpu()->PrepareExperts(device).ok());
    Twin router(rng, kExperts, kHidden, 0.1f);
    const std::vector<float> bias = Normal(rng, kExperts, 0.1f);
    const OnGpu<float> device_bias(bias), router32(router.host);
    for (const int64_t rows : RowCounts()) {
      CAPTURE(inner, rows);
      Twin x(rng, rows, kHidden), out(rng, rows, kHidden);
      std::vector<int32_t> ids(rows * kTopK);
      std::vector<float> weights(rows * kTopK);
      REQUIRE(Cpu()
                  .Router({x.cpu(), router.cpu_bf16(), bias.data(), kTopK, true, 2.827f, ids.data(),
                           weights.data()})
                  .ok());
      OnGpu<int32_t> device_ids(ids.size(), 0xff);
      OnGpu<float> device_weights(weights.size(), 0xff);
      REQUIRE(Gpu()
                  ->Router({x.gpu(), router.gpu(), device_bias.data(), kTopK, true, 2.827f, device_ids.data(),
                            device_weights.data()})
                  .ok());
      CHECK(device_ids.Get() == ids);
      CHECK(RelativeError(device_weights.Get(), weights) < 1e-5);
      REQUIRE(Cpu().Moe({x.cpu(), host, ids.data(), weights.data(), kTopK, out.cpu(), false}).ok());
      REQUIRE(Gpu()
                  ->Moe({x.gpu(), device, device_ids.data(), device_weights.data(), kTopK, out.gpu(), false})
                  .ok());
      CHECK(RelativeError(out.FromGpu(), out.host) < 8e-3);
    }
  }
}

TEST_CASE("cuda: attention of many sequences at many rows against the reference kernel") {
  KDT_NEED_GPU();
  std::mt19937 rng(24);
  constexpr int64_t kWidth = kLatent + kRope, kSlots = 6000;
  const Twin pool(rng, kSlots, kWidth);
  for (const int64_t heads : {1, 4, 8}) {
    for (const int mixed : {0, 1, 2}) {
      // Prompts alone; prompts beside single rows; many single rows and one prompt.
      std::vector<int32_t> begin = {0}, context;
      std::vector<uint8_t> causal;
      for (int s = 0; s < 16; ++s) {
        const bool prompt = mixed == 0 || (mixed == 1 ? s % 2 == 0 : s == 7);
        begin.push_back(begin.back() + (prompt ? 8 + 11 * s % 153 : 1));
        context.push_back(static_cast<int32_t>(rng() % 200));
        causal.push_back(prompt ? 1 : 0);
      }
      const int64_t rows = begin.back(), stride = 512;
      std::vector<int32_t> table(16 * stride);
      for (int32_t& slot : table) slot = static_cast<int32_t>(rng() % kSlots);
      std::vector<uint64_t> bits(rows * kAncestorWords, 0);
      for (int64_t r = 0; r < rows; ++r) bits[r * kAncestorWords] = 1;
      CAPTURE(heads, mixed, rows);
      Twin q(rng, rows, heads * kWidth), fast(rng, rows, heads * kLatent), slow(rng, rows, heads * kLatent);
      const OnGpu<int32_t> device_begin(begin), device_context(context), device_table(table);
      const OnGpu<uint8_t> device_causal(causal);
      const OnGpu<uint64_t> device_bits(bits);
      VerifyAttentionArgs args{q.gpu(),
                               MakeTensor(pool.device.data(), DType::kBF16, kSlots, kWidth),
                               heads,
                               kLatent,
                               kRope,
                               0.1f,
                               16,
                               device_begin.data(),
                               device_context.data(),
                               device_causal.data(),
                               device_table.data(),
                               stride,
                               device_bits.data(),
                               fast.gpu()};
      REQUIRE(Gpu()->VerifyAttention(args).ok());
      args.out = slow.gpu();
      REQUIRE(Gpu()->VerifyAttentionReference(args).ok());
      CHECK(RelativeError(fast.FromGpu(), slow.FromGpu()) < 8e-3);
    }
  }
}

TEST_CASE("cuda: what prepares attention, and norms, at many rows") {
  KDT_NEED_GPU();
  std::mt19937 rng(25);
  const Twin q_norm(rng, 1, kQLora), kv_norm(rng, 1, kLatent), norm(rng, 1, kHidden);
  std::vector<float> inv_freq(kRope / 2);
  for (size_t i = 0; i < inv_freq.size(); ++i) {
    inv_freq[i] = std::pow(50000.0f, -static_cast<float>(i) / static_cast<float>(inv_freq.size()));
  }
  const OnGpu<float> device_freq(inv_freq);
  for (const int64_t rows : RowCounts()) {
    CAPTURE(rows);
    Twin qkv(rng, rows, kQLora + kLatent + kRope),
        pool(std::vector<float>((rows + 5) * 576, 0), rows + 5, 576);
    std::vector<int32_t> positions(rows), slots(rows);
    for (int64_t r = 0; r < rows; ++r) positions[r] = static_cast<int32_t>(r * 7 % 900);
    std::iota(slots.begin(), slots.end(), 3);
    std::shuffle(slots.begin(), slots.end(), rng);
    const OnGpu<int32_t> device_positions(positions), device_slots(slots);
    MlaPrepareArgs args{qkv.cpu(),           kQLora,    kLatent,          kRope,           q_norm.bits.data(),
                        kv_norm.bits.data(), 1e-6f,     positions.data(), inv_freq.data(), 1.0f,
                        slots.data(),        pool.cpu()};
    REQUIRE(Cpu().MlaPrepare(args).ok());
    args = {qkv.gpu(),
            kQLora,
            kLatent,
            kRope,
            q_norm.device.data(),
            kv_norm.device.data(),
            1e-6f,
            device_positions.data(),
            device_freq.data(),
            1.0f,
            device_slots.data(),
            pool.gpu()};
    REQUIRE(Gpu()->MlaPrepare(args).ok());
    CHECK(RelativeError(pool.FromGpu(), pool.host) < 6e-3);
    Twin x(rng, rows, kHidden), sum(rng, rows, kHidden), out(rng, rows, kHidden);
    REQUIRE(Cpu().RmsNorm({x.cpu(), sum.cpu(), norm.bits.data(), 1e-5f, out.cpu()}).ok());
    REQUIRE(Gpu()->RmsNorm({x.gpu(), sum.gpu(), norm.device.data(), 1e-5f, out.gpu()}).ok());
    CHECK(RelativeError(out.FromGpu(), out.host) < 6e-3);
    CHECK(RelativeError(sum.FromGpu(), sum.host) < 4e-3);
  }
}

}  // namespace
}  // namespace kdt::kernels::test
