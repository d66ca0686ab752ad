// The CPU ops at the shapes of the shipped model (hidden 256, 8 heads, latent 512, rope 64, 16 experts top 4
// of width 256, vocabulary 4096), tp 1. Arguments: rows, threads; attention also context length. Bytes a
// second count the weights (or keys) an op must read once; BM_Stream is what the machine reads with the same
// threads.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "kdt/kernels/backend.h"
#include "kernels/cpu/thread_pool.h"
#include "tests/bench/memory_stream.h"

namespace kdt::kernels {
namespace {

constexpr int64_t kHidden = 256, kHeads = 8, kNope = 32, kRope = 64, kV = 32, kLatent = 512;
constexpr int64_t kExperts = 16, kTopK = 4, kInner = 256, kVocab = 4096;
constexpr int64_t kModelBytes = 22 << 20;

// How many layers' worth of weights a benchmark walks through: as in a step, a weight's turn comes again when
// as many bytes as the model has have been read.
int64_t Layers(int64_t bytes) { return std::max<int64_t>(1, kModelBytes / bytes); }

std::unique_ptr<Backend> MakeBackend(const benchmark::State& state) {
  return std::move(*MakeCpuBackend(static_cast<int>(state.range(1))));
}

std::vector<float> Values(int64_t count) {
  std::mt19937 rng(1);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::vector<float> values(count);
  for (float& value : values) value = uniform(rng);
  return values;
}

std::vector<uint16_t> Weights(int64_t count) {
  std::vector<uint16_t> weights(count);
  for (int64_t i = 0; i < count; ++i) weights[i] = static_cast<uint16_t>(0x3d00 + i % 251);
  return weights;
}

Tensor View(std::vector<float>& values, int64_t rows, int64_t cols) {
  return MakeTensor(values.data(), DType::kF32, rows, cols);
}

void BM_Stream(benchmark::State& state) {
  const int64_t bytes = state.range(0) << 20, threads = state.range(1);
  std::vector<uint64_t> data(bytes / 8, 1);
  cpu::ThreadPool pool(static_cast<int>(threads));
  constexpr int64_t kPiece = 1 << 18;
  for (auto _ : state) {
    pool.Run(bytes / kPiece, [&](int task, int) {
      benchmark::DoNotOptimize(bench::StreamRead(data.data() + task * (kPiece / 8), kPiece));
    });
  }
  state.SetBytesProcessed(state.iterations() * bytes);
}
BENCHMARK(BM_Stream)->ArgNames({"MiB", "threads"})->ArgsProduct({{4, 22, 256}, {1, 2}})->UseRealTime();

void BM_Gemm(benchmark::State& state) {
  const int64_t rows = state.range(0), inputs = state.range(2), outs = state.range(3);
  const auto backend = MakeBackend(state);
  std::vector<float> x = Values(rows * inputs), y(rows * outs);
  const int64_t layers = Layers(outs * inputs * 2);
  std::vector<uint16_t> w = Weights(layers * outs * inputs);
  int64_t layer = 0;
  for (auto _ : state) {
    uint16_t* weights = w.data() + layer++ % layers * outs * inputs;
    (void)backend->Gemm(
        {View(x, rows, inputs), MakeTensor(weights, DType::kBF16, outs, inputs), View(y, rows, outs)});
  }
  state.SetBytesProcessed(state.iterations() * outs * inputs * 2);
}
BENCHMARK(BM_Gemm)
    ->ArgNames({"rows", "threads", "in", "out"})
    ->ArgsProduct({{1, 8, 64, 512}, {1, 2}, {kHidden}, {256, 576, kVocab}})
    ->UseRealTime();

void BM_AbsorbQuery(benchmark::State& state) {
  const int64_t rows = state.range(0), size = kHeads * (kNope + kV) * kLatent;
  const auto backend = MakeBackend(state);
  std::vector<float> q = Values(rows * kHeads * (kNope + kRope)), out(rows * kHeads * (kLatent + kRope));
  const int64_t layers = Layers(size * 2);
  std::vector<uint16_t> w = Weights(layers * size);
  int64_t layer = 0;
  for (auto _ : state) {
    (void)backend->AbsorbQuery({View(q, rows, kHeads * (kNope + kRope)), w.data() + layer++ % layers * size,
                                kHeads, kNope, kRope, kV, kLatent,
                                View(out, rows, kHeads * (kLatent + kRope))});
  }
  state.SetBytesProcessed(state.iterations() * kHeads * kNope * kLatent * 2);
}
BENCHMARK(BM_AbsorbQuery)->ArgNames({"rows", "threads"})->ArgsProduct({{1, 8, 64}, {1, 2}})->UseRealTime();

void BM_AbsorbValue(benchmark::State& state) {
  const int64_t rows = state.range(0), size = kHeads * (kNope + kV) * kLatent;
  const auto backend = MakeBackend(state);
  std::vector<float> attended = Values(rows * kHeads * kLatent), out(rows * kHeads * kV);
  const int64_t layers = Layers(size * 2);
  std::vector<uint16_t> w = Weights(layers * size);
  int64_t layer = 0;
  for (auto _ : state) {
    (void)backend->AbsorbValue({View(attended, rows, kHeads * kLatent), w.data() + layer++ % layers * size,
                                kHeads, kNope, kV, kLatent, View(out, rows, kHeads * kV)});
  }
  state.SetBytesProcessed(state.iterations() * kHeads * kV * kLatent * 2);
}
BENCHMARK(BM_AbsorbValue)->ArgNames({"rows", "threads"})->ArgsProduct({{1, 8, 64}, {1, 2}})->UseRealTime();

void BM_Moe(benchmark::State& state) {
  const int64_t rows = state.range(0), inner = state.range(2);
  const auto backend = MakeBackend(state);
  std::mt19937 rng(2);
  std::vector<float> x = Values(rows * kHidden), out(rows * kHidden), expert_weights(rows * kTopK, 0.25f);
  const int64_t gate_up_words = kExperts * 2 * inner * kHidden / 8, down_words = gate_up_words / 2;
  const int64_t expert_bytes = 3 * kHidden * inner / 2 + 3 * kHidden * inner / 32 * 2;
  const int64_t layers = Layers(kExperts * expert_bytes);
  std::vector<uint32_t> gate_up(layers * gate_up_words), down(layers * down_words);
  for (uint32_t& word : gate_up) word = rng();
  for (uint32_t& word : down) word = rng();
  const std::vector<uint16_t> gate_up_scale(layers * gate_up_words / 4, 0x3c00);
  const std::vector<uint16_t> down_scale(layers * down_words / 4, 0x3c00);
  std::vector<int32_t> ids(rows * kTopK);
  std::vector<bool> used(kExperts);
  for (int64_t r = 0; r < rows; ++r) {
    std::vector<int32_t> order(kExperts);
    for (int32_t e = 0; e < kExperts; ++e) order[e] = e;
    std::shuffle(order.begin(), order.end(), rng);
    std::sort(order.begin(), order.begin() + kTopK);
    std::copy(order.begin(), order.begin() + kTopK, ids.begin() + r * kTopK);
    for (int k = 0; k < kTopK; ++k) used[order[k]] = true;
  }
  int64_t next = 0;
  for (auto _ : state) {
    const int64_t layer = next++ % layers;
    const Int4Experts experts{kExperts,
                              0,
                              kHidden,
                              inner,
                              gate_up.data() + layer * gate_up_words,
                              gate_up_scale.data() + layer * gate_up_words / 4,
                              down.data() + layer * down_words,
                              down_scale.data() + layer * down_words / 4};
    (void)backend->Moe({View(x, rows, kHidden), experts, ids.data(), expert_weights.data(), kTopK,
                        View(out, rows, kHidden)});
  }
  state.SetBytesProcessed(state.iterations() * std::count(used.begin(), used.end(), true) * expert_bytes);
}
BENCHMARK(BM_Moe)
    ->ArgNames({"rows", "threads", "inner"})
    ->ArgsProduct({{1, 8, 64, 512}, {1, 2}, {kInner}})
    ->Args({1, 1, 32})
    ->Args({64, 1, 32})
    ->UseRealTime();

void BM_VerifyAttention(benchmark::State& state) {
  const int64_t rows = state.range(0), context = state.range(2), heads = state.range(3),
                width = kLatent + kRope;
  const DType dtype = state.range(4) == 0 ? DType::kF32 : DType::kBF16;
  const auto backend = MakeBackend(state);
  std::vector<float> q = Values(rows * heads * width), pool = Values((context + rows) * width),
                     out(rows * heads * kLatent);
  std::vector<uint16_t> narrow(pool.size(), 0x3d00);
  std::vector<int32_t> slots(context + rows);
  for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int32_t>(i);
  std::vector<uint64_t> bits(rows * kAncestorWords);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t node = r; node > 0; node /= 2)
      bits[r * kAncestorWords + node / 64] |= uint64_t{1} << node % 64;
    bits[r * kAncestorWords] |= 1;
  }
  const int32_t row_begin[] = {0, static_cast<int32_t>(rows)}, length = static_cast<int32_t>(context);
  const uint8_t causal = 0;
  void* data = dtype == DType::kF32 ? static_cast<void*>(pool.data()) : narrow.data();
  for (auto _ : state) {
    (void)backend->VerifyAttention({View(q, rows, heads * width),
                                    MakeTensor(data, dtype, context + rows, width), heads, kLatent, kRope,
                                    0.1f, 1, row_begin, &length, &causal, slots.data(), context + rows,
                                    bits.data(), View(out, rows, heads * kLatent)});
  }
  state.SetBytesProcessed(state.iterations() * context * width * DTypeSize(dtype));
  state.counters["GFLOP/s"] = benchmark::Counter(
      static_cast<double>(state.iterations() * rows * heads * context * (width + kLatent) * 2) * 1e-9,
      benchmark::Counter::kIsRate);
}
BENCHMARK(BM_VerifyAttention)
    ->ArgNames({"rows", "threads", "context", "heads", "bf16"})
    ->ArgsProduct({{1, 8, 64}, {1, 2}, {64, 1024}, {kHeads}, {0}})
    ->ArgsProduct({{1, 64}, {1}, {1024}, {kHeads}, {1}})
    ->ArgsProduct({{1, 64}, {1}, {1024}, {1}, {0}})
    ->UseRealTime();

void BM_DraftAttention(benchmark::State& state) {
  const int64_t sequences = state.range(0), context = state.range(2), heads = 4, kv_heads = 2, dim = 64,
                block = 8;
  const auto backend = MakeBackend(state);
  std::vector<float> q = Values(sequences * block * heads * dim),
                     k = Values(sequences * block * kv_heads * dim),
                     pool = Values(context * 2 * kv_heads * dim), out(q.size());
  std::vector<int32_t> slots(sequences * context), lengths(sequences, static_cast<int32_t>(context)),
      window(sequences);
  for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int32_t>(i % context);
  for (auto _ : state) {
    (void)backend->DraftAttention(
        {View(q, sequences * block, heads * dim), View(k, sequences * block, kv_heads * dim),
         View(k, sequences * block, kv_heads * dim), View(pool, context, 2 * kv_heads * dim), heads, kv_heads,
         dim, block, 0.1f, sequences, lengths.data(), window.data(), slots.data(), context,
         View(out, sequences * block, heads * dim)});
  }
  state.SetBytesProcessed(state.iterations() * sequences * context * 2 * kv_heads * dim * 4);
}
BENCHMARK(BM_DraftAttention)
    ->ArgNames({"sequences", "threads", "context"})
    ->Args({1, 1, 1024})
    ->Args({8, 1, 1024});

void BM_Router(benchmark::State& state) {
  const int64_t rows = state.range(0);
  const auto backend = MakeBackend(state);
  std::vector<float> x = Values(rows * kHidden), bias(kExperts), weights(rows * kTopK);
  std::vector<uint16_t> w = Weights(kExperts * kHidden);
  std::vector<int32_t> ids(rows * kTopK);
  for (auto _ : state) {
    (void)backend->Router({View(x, rows, kHidden), MakeTensor(w.data(), DType::kBF16, kExperts, kHidden),
                           bias.data(), kTopK, true, 2.8f, ids.data(), weights.data()});
  }
}
BENCHMARK(BM_Router)->ArgNames({"rows", "threads"})->ArgsProduct({{1, 8, 64}, {1}});

void BM_RmsNorm(benchmark::State& state) {
  const int64_t rows = state.range(0);
  const auto backend = MakeBackend(state);
  std::vector<float> x = Values(rows * kHidden), residual = Values(rows * kHidden), out(rows * kHidden);
  std::vector<uint16_t> weight = Weights(kHidden);
  std::fill(x.begin(), x.end(), 0.0f);
  for (auto _ : state) {
    (void)backend->RmsNorm({View(x, rows, kHidden), View(residual, rows, kHidden), weight.data(), 1e-5f,
                            View(out, rows, kHidden)});
  }
}
BENCHMARK(BM_RmsNorm)->ArgNames({"rows", "threads"})->ArgsProduct({{1, 8, 64}, {1}});

void BM_Rope(benchmark::State& state) {
  const int64_t rows = state.range(0);
  const auto backend = MakeBackend(state);
  std::vector<float> x = Values(rows * kHeads * (kNope + kRope)), inv_freq(kRope / 2, 0.01f);
  std::vector<int32_t> positions(rows, 1234);
  for (auto _ : state) {
    (void)backend->Rope({View(x, rows, kHeads * (kNope + kRope)), kHeads, kNope + kRope, kNope, kRope,
                         positions.data(), inv_freq.data(), 1.0f, RopeLayout::kInterleaved});
  }
}
BENCHMARK(BM_Rope)->ArgNames({"rows", "threads"})->ArgsProduct({{1, 8, 64}, {1}});

void BM_SiluMul(benchmark::State& state) {
  const int64_t rows = state.range(0);
  const auto backend = MakeBackend(state);
  std::vector<float> x = Values(rows * 2 * kInner), out(rows * kInner);
  for (auto _ : state) (void)backend->SiluMul({View(x, rows, 2 * kInner), View(out, rows, kInner)});
}
BENCHMARK(BM_SiluMul)->ArgNames({"rows", "threads"})->ArgsProduct({{1, 8, 64}, {1}});

void BM_LogitsTopK(benchmark::State& state) {
  const int64_t rows = state.range(0), k = state.range(2);
  const auto backend = MakeBackend(state);
  std::vector<float> logits = Values(rows * kVocab), max(rows), sum(rows), values(rows * k);
  std::vector<uint8_t> bad(rows);
  std::vector<int32_t> ids(rows * k);
  for (auto _ : state) {
    (void)backend->LogitsTopK(
        {View(logits, rows, kVocab), 0, k, max.data(), sum.data(), bad.data(), ids.data(), values.data()});
  }
}
BENCHMARK(BM_LogitsTopK)->ArgNames({"rows", "threads", "k"})->ArgsProduct({{1, 8, 64}, {1}, {1, 64}});

void BM_GumbelArgmax(benchmark::State& state) {
  const int64_t rows = state.range(0);
  const auto backend = MakeBackend(state);
  std::vector<float> logits = Values(rows * kVocab), value(rows);
  std::vector<float> temperature(rows, static_cast<float>(state.range(2)) * 0.1f);
  std::vector<uint64_t> seed(rows, 7);
  std::vector<int64_t> position(rows, 100);
  std::vector<int32_t> id(rows);
  for (auto _ : state) {
    (void)backend->GumbelArgmax({View(logits, rows, kVocab), 0, temperature.data(), seed.data(),
                                 position.data(), id.data(), value.data()});
  }
}
BENCHMARK(BM_GumbelArgmax)
    ->ArgNames({"rows", "threads", "temperature_tenths"})
    ->ArgsProduct({{1, 8, 64}, {1}, {0, 10}});

}  // namespace
}  // namespace kdt::kernels

BENCHMARK_MAIN();
