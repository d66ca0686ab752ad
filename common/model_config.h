// The target model's description, read from a checkpoint folder. Anything that the engine does not compute is
// refused with the field's name, never ignored.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/rope.h"

namespace kdt {

// Defaults of generation_config.json; unset: the file does not say.
struct SamplingDefaults {
  std::optional<double> temperature;
  std::optional<double> top_p;
  std::optional<int64_t> top_k;  // 0: off
  std::optional<double> min_p;
  std::optional<double> repetition_penalty;
  std::optional<int64_t> max_new_tokens;
};

// Kimi-K2 / DeepSeek-V3 shape: MLA attention, `first_k_dense_replace` dense layers, then MoE layers.
struct ModelConfig {
  std::string model_type;     // of the outer config: kimi_k25, kimi_k2, deepseek_v3
  std::string tensor_prefix;  // "language_model." or ""; tensor names are prefix + "model.layers.0..." /
                              // prefix + "lm_head.weight"

  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t first_k_dense_replace = 0;
  int64_t num_attention_heads = 0;
  int64_t q_lora_rank = 0;
  int64_t kv_lora_rank = 0;
  int64_t qk_nope_head_dim = 0;
  int64_t qk_rope_head_dim = 0;
  int64_t v_head_dim = 0;
  int64_t intermediate_size = 0;      // dense layers
  int64_t moe_intermediate_size = 0;  // one expert
  int64_t n_routed_experts = 0;
  int64_t num_experts_per_tok = 0;
  int64_t n_shared_experts = 0;  // shared MLP width = n_shared_experts * moe_intermediate_size; 0: none
  bool norm_topk_prob = true;
  double routed_scaling_factor = 1.0;
  double rms_norm_eps = 1e-5;
  int64_t max_position_embeddings = 0;
  RopeConfig rope;  // dim = qk_rope_head_dim, interleaved pairs

  int64_t int4_group_size = 0;  // routed experts: input values that share a scale (32)

  int64_t bos_token_id = -1;  // -1: not given
  int64_t pad_token_id = -1;
  std::vector<int64_t> eos_token_ids;  // of config.json and generation_config.json together, ascending
  SamplingDefaults sampling;

  int64_t QkHeadDim() const { return qk_nope_head_dim + qk_rope_head_dim; }
  bool IsMoeLayer(int64_t layer) const { return layer >= first_k_dense_replace; }
  // (nope + rope)^-0.5, with YaRN's mscale_all_dim times (0.1 x mscale_all_dim x ln(factor) + 1)^2.
  float SoftmaxScale() const;

  // Reads config.json and, if present, generation_config.json in `folder`.
  static absl::StatusOr<ModelConfig> Load(const std::string& folder);
  // From text; for tests and tools. `generation_json` may be empty.
  static absl::StatusOr<ModelConfig> Parse(const std::string& config_json,
                                           const std::string& generation_json);

  // INVALID_ARGUMENT naming the field that `tp` ranks cannot split evenly (heads, intermediate sizes,
  // vocabulary; the number of routed experts instead of their width when they are `whole_experts`).
  absl::Status CheckTensorParallel(int64_t tp, bool whole_experts = false) const;
};

}  // namespace kdt
