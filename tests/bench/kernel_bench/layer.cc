// A layer of the forward inside a captured step: kLayers MoE layers of one K2.6 rank (tp 8) with weights of
// their own, queued by the engine's own TargetForward on a group of one, so without all-reduces. An op's cost
// is what the graph loses without it, and beside it stands the time of a graph of this op alone.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "kdt/kernels/cuda_backend.h"
#include "tests/bench/kernel_bench/bench.h"
#include "tests/bench/kernel_bench/device.h"
#include "tests/bench/kernel_bench/op_filter.h"
#include "worker/engine/target_forward.h"

namespace kdt::bench {
namespace {

using kernels::DType;
using kernels::MakeTensor;
using kernels::Tensor;

constexpr int kLayers = 8;
constexpr int64_t kMaxRows = 64, kTokens = 1024;

void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "layer: %s\n", status.ToString().c_str());
  std::exit(1);
}
template <typename T>
T Take(absl::StatusOr<T> made) {
  Check(made.status());
  return std::move(*made);
}

ModelConfig K26() {
  ModelConfig c;
  c.vocab_size = kTokens * 8;
  c.hidden_size = 7168;
  c.num_hidden_layers = kLayers;
  c.first_k_dense_replace = 0;
  c.num_attention_heads = 64;
  c.q_lora_rank = 1536;
  c.kv_lora_rank = 512;
  c.qk_nope_head_dim = 128;
  c.qk_rope_head_dim = 64;
  c.v_head_dim = 128;
  c.moe_intermediate_size = 2048;
  c.n_routed_experts = 384;
  c.num_experts_per_tok = 8;
  c.n_shared_experts = 1;
  c.routed_scaling_factor = 2.827;
  c.rope.dim = 64;
  return c;
}

class LayerBench {
 public:
  LayerBench(Bench& bench, int context)
      : bench_(bench),
        context_(context),
        config_(K26()),
        base_(Take(kernels::MakeCudaBackend({}))),
        ops_(*base_) {
    for (int l = 0; l < kLayers; ++l) weights_.layers.push_back(Layer());
    weights_.embedding = Matrix(kTokens, config_.hidden_size, 1.0f);
    weights_.lm_head = Matrix(256, config_.hidden_size, 0.01f);
    weights_.final_norm = Norm(config_.hidden_size);
    weights_.rope_inv_freq = bench.Copy(config_.rope.InvFreq());
    KDT_BENCH_CUDA(cudaDeviceSynchronize());
    kv_ = Take(KvStorage::Create(*base_, kLayers, 2 * (context_ + kMaxRows), 576, DType::kBF16));
    for (int l = 0; l < kLayers; ++l)
      FillNormal(nullptr, kv_.Layer(l).data, kv_.Layer(l).rows * 576, 100 + l, 1.0f);
    forward_ = Take(TargetForward::Create(&ops_, &config_, &weights_, &kv_, {0, 8}, kMaxRows));
    collective_ = MakeLocalCollective();
    for (cudaEvent_t& event : events_) KDT_BENCH_CUDA(cudaEventCreate(&event));
    KDT_BENCH_CUDA(cudaDeviceSynchronize());
  }

  void Run(int64_t rows) {
    rows_ = Rows(rows);
    ops_.Begin([](int) { return true; }, true);
    Check(Pass());
    Check(base_->Synchronize());
    // An embedding and a norm stand before the layers; the last one ends in an add instead of the next one's
    // norm.
    const std::vector<OpFacts> facts = ops_.ops();
    const int per_layer = (static_cast<int>(facts.size()) - 2) / kLayers;
    if (per_layer * kLayers + 2 != static_cast<int>(facts.size())) Check(absl::InternalError("ops a layer"));
    const int inside = per_layer * kLayers;
    const auto op_of = [&](int number) {  // -1: of no layer
      return number < 2 ? -1 : (number - 2) % per_layer;
    };
    std::vector<double> bytes(per_layer), flop(per_layer);
    for (int i = 2; i < inside + 2; ++i) {
      bytes[op_of(i)] += facts[i].bytes / kLayers;
      flop[op_of(i)] += facts[i].flop / kLayers;
    }
    const double none = Time([&](int i) { return op_of(i) < 0; });
    const double all = Time([](int) { return true; });
    const double layer = (all - none) / kLayers;
    double floor = 0;
    for (int i = 0; i < per_layer; ++i) floor += Floor(bytes[i], flop[i]);
    std::printf("layer, context %d, %d rows: %.2f us, floor %.2f us (%.2f x)\n", context_,
                static_cast<int>(rows), layer, floor, layer / floor);
    std::printf("  %-22s %8s %8s %8s\n", "op", "costs", "alone", "floor");
    for (int op = 0; op < per_layer; ++op) {
      const double without = Time([&](int i) { return op_of(i) != op; });
      const double alone = Time([&](int i) { return op_of(i) < 0 || op_of(i) == op; });
      std::printf("  %-22s %8.2f %8.2f %8.2f\n", facts[2 + op].name.c_str(), (all - without) / kLayers,
                  (alone - none) / kLayers, Floor(bytes[op], flop[op]));
    }
    bench_.Report({"layer", "context " + std::to_string(context_) + " rows " + std::to_string(rows), layer,
                   std::accumulate(bytes.begin(), bytes.end(), 0.0),
                   std::accumulate(flop.begin(), flop.end(), 0.0), 0});
  }

 private:
  static double Floor(double bytes, double flop) { return std::max(bytes / 4.1e12, flop / 638e12) * 1e6; }

  absl::Status Pass() {
    PhaseTimes times;
    return forward_->Run(
        rows_, *collective_, [](int64_t, const Tensor&) { return absl::OkStatus(); }, &times);
  }

  // Median time of a graph of the wanted ops, launch included.
  double Time(const std::function<bool(int)>& wanted) {
    ops_.Begin(wanted);
    const std::unique_ptr<kernels::Graph> graph = Take(base_->Capture([&] { return Pass(); }));
    auto* const stream = static_cast<cudaStream_t>(base_->stream());
    std::vector<float> times;
    for (int i = 0; i < 2 + kRepeats; ++i) {
      Delay(stream, 100000);
      KDT_BENCH_CUDA(cudaEventRecord(events_[0], stream));
      Check(graph->Replay());
      KDT_BENCH_CUDA(cudaEventRecord(events_[1], stream));
      KDT_BENCH_CUDA(cudaStreamSynchronize(stream));
      float ms = 0;
      KDT_BENCH_CUDA(cudaEventElapsedTime(&ms, events_[0], events_[1]));
      if (i >= 2) times.push_back(ms * 1e3f);
    }
    std::sort(times.begin(), times.end());
    return times[kRepeats / 2];
  }

  // One sequence: a context in random slots and a chain of rows.
  StepRows Rows(int64_t rows) {
    std::mt19937 rng(7);
    std::vector<int32_t> slots(kv_.Layer(0).rows - 1), tokens(rows), positions(rows);
    std::iota(slots.begin(), slots.end(), 1);
    std::shuffle(slots.begin(), slots.end(), rng);
    slots.resize(context_ + rows);
    std::vector<uint64_t> bits(rows * kernels::kAncestorWords, 0);
    for (int64_t i = 0; i < rows; ++i) {
      tokens[i] = static_cast<int32_t>(rng() % kTokens);
      positions[i] = static_cast<int32_t>(context_ + i);
      for (int64_t j = 0; j <= i; ++j) bits[i * kernels::kAncestorWords + j / 64] |= uint64_t{1} << (j % 64);
    }
    StepRows r;
    r.rows = rows;
    r.sequences = 1;
    r.tokens = bench_.Copy(tokens);
    r.positions = bench_.Copy(positions);
    r.slots = bench_.Copy(std::vector<int32_t>(slots.begin() + context_, slots.end()));
    r.row_begin = bench_.Copy(std::vector<int32_t>{0, static_cast<int32_t>(rows)});
    r.context_length = bench_.Copy(std::vector<int32_t>{context_});
    r.causal = bench_.Copy(std::vector<uint8_t>{0});
    r.slot_table = bench_.Copy(slots);
    r.table_stride = context_ + rows;
    r.ancestor_bits = bench_.Copy(bits);
    return r;
  }

  Tensor Matrix(int64_t rows, int64_t cols, float scale) {
    void* data = bench_.Memory(rows * cols * 2);
    FillNormal(nullptr, data, rows * cols, ++seed_, scale);
    return MakeTensor(data, DType::kBF16, rows, cols);
  }
  // Weights that keep the size of their inputs.
  Tensor Weight(int64_t outs, int64_t ins) {
    return Matrix(outs, ins, 1.0f / std::sqrt(static_cast<float>(ins)));
  }
  const uint16_t* Norm(int64_t n) { return bench_.Copy(std::vector<uint16_t>(n, 0x3f80)); }  // ones
  const uint32_t* Bits(int64_t words) {
    void* data = bench_.Memory(words * 4);
    FillBits(nullptr, data, words, ++seed_);
    return static_cast<uint32_t*>(data);
  }
  TargetLayerWeights Layer() {
    const int64_t hidden = config_.hidden_size, heads = 8, inner = 256, experts = config_.n_routed_experts;
    TargetLayerWeights w;
    w.input_norm = Norm(hidden);
    w.qkv_a = Weight(1536 + 576, hidden);
    w.q_a_norm = Norm(1536);
    w.kv_a_norm = Norm(512);
    w.q_b = Weight(heads * 192, 1536);
    w.kv_b = Weight(heads * 256, 512).bf16();
    w.o = Weight(hidden, heads * 128);
    w.post_norm = Norm(hidden);
    w.gate_up = Weight(2 * inner, hidden);
    w.down = Weight(hidden, inner);
    w.router = Weight(experts, hidden);
    w.router_bias = bench_.Copy(std::vector<float>(experts, 0.0f));
    w.experts.experts = experts;
    w.experts.hidden = hidden;
    w.experts.inner = inner;
    // Values of -8 .. 7, 4.6 on average.
    const float gate_scale = 1.0f / std::sqrt(static_cast<float>(hidden)) / 4.6f;
    const float down_scale = 1.0f / std::sqrt(static_cast<float>(inner)) / 4.6f;
    w.experts.gate_up = Bits(experts * 2 * inner * hidden / 8);
    w.experts.gate_up_scale = Matrix(experts * 2 * inner, hidden / 32, gate_scale).bf16();
    w.experts.down = Bits(experts * hidden * inner / 8);
    w.experts.down_scale = Matrix(experts * hidden, inner / 32, down_scale).bf16();
    return w;
  }

  static constexpr int kRepeats = 9;
  Bench& bench_;
  const int context_;
  ModelConfig config_;
  std::unique_ptr<kernels::Backend> base_;
  OpFilter ops_;
  uint32_t seed_ = 0;
  TargetWeights weights_;
  KvStorage kv_;
  std::unique_ptr<TargetForward> forward_;
  std::unique_ptr<Collective> collective_;
  StepRows rows_;
  cudaEvent_t events_[2];
};

}  // namespace

void BenchLayer(Bench& bench, int context) {
  LayerBench layer(bench, context);
  for (const int64_t rows : {1, 8, 16, 32}) layer.Run(rows);
}

}  // namespace kdt::bench
