#include "tests/bench/rank_bench/floor.h"

#include <algorithm>
#include <cmath>

namespace kdt::bench {
namespace {

constexpr double kBf16 = 2;
constexpr double kInt4 = 0.5 + 2.0 / 32;  // a value and its share of a bf16 scale

class Sum {
 public:
  explicit Sum(const Machine& machine) : machine_(machine) {}
  // A product with a weight of `values` numbers of which each row uses `used`, done `times` times.
  void Weight(double times, double values, double bytes_a_value, double rows, double used) {
    cost_.weight_bytes += times * values * bytes_a_value;
    Part(times, values * bytes_a_value, 2 * rows * used);
  }
  void Weight(double times, double values, double rows) { Weight(times, values, kBf16, rows, values); }
  void Kv(double times, double bytes, double flop) {
    cost_.kv_bytes += times * bytes;
    Part(times, bytes, flop);
  }
  void Reduce(int64_t times) {
    cost_.reductions += times;
    cost_.us += static_cast<double>(times) * machine_.reduce_us;
  }
  Cost cost_;

 private:
  void Part(double times, double bytes, double flop) {
    cost_.flop += times * flop;
    cost_.us += times * std::max(bytes / machine_.bytes_per_s, flop / machine_.flop_per_s) * 1e6;
  }
  const Machine& machine_;
};

double D(int64_t value) { return static_cast<double>(value); }

}  // namespace

double DistinctExperts(double experts, double top_k, double rows) {
  return experts * (1 - std::pow(1 - top_k / experts, rows));
}

Cost TargetCost(const ModelConfig& config, const Load& load, const Machine& machine) {
  Sum sum(machine);
  const double tp = load.tp, rows = D(load.rows), hidden = D(config.hidden_size);
  const double heads = D(config.num_attention_heads) / tp, layers = D(config.num_hidden_layers);
  const double latent = D(config.kv_lora_rank), rope = D(config.qk_rope_head_dim);
  const double moe_layers = layers - D(config.first_k_dense_replace);

  sum.Weight(layers, hidden * (D(config.q_lora_rank) + latent + rope), rows);
  sum.Weight(layers, D(config.q_lora_rank) * heads * D(config.QkHeadDim()), rows);
  sum.Weight(layers, heads * D(config.qk_nope_head_dim + config.v_head_dim) * latent, rows);
  sum.Weight(layers, heads * D(config.v_head_dim) * hidden, rows);
  // Scores over latent and rope, values over the latent, for every row and head.
  sum.Kv(layers, D(load.batch * load.context) * (latent + rope) * kBf16,
         rows * heads * D(load.context) * 2 * (2 * latent + rope));

  sum.Weight(D(config.first_k_dense_replace), 3 * D(config.intermediate_size) / tp * hidden, rows);
  sum.Weight(moe_layers, D(config.n_routed_experts) * hidden, rows);
  sum.Weight(moe_layers, 3 * D(config.n_shared_experts * config.moe_intermediate_size) / tp * hidden, rows);
  const double top_k = D(config.num_experts_per_tok);
  const double expert = 3 * D(config.moe_intermediate_size) * hidden / tp;  // a rank's share, either way
  sum.cost_.experts =
      load.experts > 0 ? load.experts : DistinctExperts(D(config.n_routed_experts), top_k, rows);
  sum.cost_.expert_bytes = moe_layers * sum.cost_.experts * expert * kInt4;
  sum.Weight(moe_layers, sum.cost_.experts * expert, kInt4, rows, top_k * expert);
  sum.Weight(1, D(config.vocab_size) / tp * hidden, rows);
  if (load.tp > 1) sum.Reduce(2 * config.num_hidden_layers + 1);
  return sum.cost_;
}

Cost DrafterCost(const DrafterConfig& drafter, const ModelConfig& target, const Load& load,
                 const Machine& machine) {
  Sum sum(machine);
  const double tp = load.tp, hidden = D(drafter.hidden_size), layers = D(drafter.num_hidden_layers);
  const double heads = D(drafter.num_attention_heads) / tp, dim = D(drafter.head_dim);
  const double kv_heads = std::max(1.0, D(drafter.num_key_value_heads) / tp);
  const double block_rows = D(load.batch * drafter.block_size);
  sum.Weight(D(static_cast<int64_t>(drafter.target_layer_ids.size())), hidden * hidden / tp, D(load.rows));
  sum.Weight(layers, hidden * dim * (2 * heads + 2 * kv_heads), block_rows);
  sum.Weight(layers, 3 * hidden * D(drafter.intermediate_size) / tp, block_rows);
  sum.Kv(layers, D(load.batch * load.context) * 2 * kv_heads * dim * kBf16,
         block_rows * heads * D(load.context) * 4 * dim);
  sum.Weight(1, D(target.vocab_size) / tp * hidden, block_rows - D(load.batch));
  // Features, the block's embedding, and two a layer.
  if (load.tp > 1) sum.Reduce(2 + 2 * drafter.num_hidden_layers);
  return sum.cost_;
}

}  // namespace kdt::bench
