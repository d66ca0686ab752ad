#include "worker/model/target_weights.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace kdt {
namespace {

using Part = WeightLoader::Part;
using Split = WeightLoader::Split;

// gate_proj and up_proj as one matrix, and down_proj, of an MLP with `inner` columns inside.
absl::Status LoadMlp(const std::string& prefix, int64_t hidden, int64_t inner, WeightLoader& loader,
                     TargetLayerWeights* layer) {
  const Part gate_up[] = {{prefix + "gate_proj.weight", inner, hidden, Split::kRows},
                          {prefix + "up_proj.weight", inner, hidden, Split::kRows}};
  KDT_ASSIGN_OR_RETURN(layer->gate_up, loader.Matrix(gate_up));
  KDT_ASSIGN_OR_RETURN(layer->down,
                       loader.Matrix({prefix + "down_proj.weight", hidden, inner, Split::kColumns}));
  return absl::OkStatus();
}

absl::Status LoadAttention(const ModelConfig& config, const std::string& prefix, WeightLoader& loader,
                           TargetLayerWeights* layer) {
  const int64_t heads = config.num_attention_heads;
  const int64_t hidden = config.hidden_size;
  const Part qkv_a[] = {
      {prefix + "q_a_proj.weight", config.q_lora_rank, hidden},
      {prefix + "kv_a_proj_with_mqa.weight", config.kv_lora_rank + config.qk_rope_head_dim, hidden}};
  KDT_ASSIGN_OR_RETURN(layer->qkv_a, loader.Matrix(qkv_a));
  KDT_ASSIGN_OR_RETURN(layer->q_a_norm, loader.Vector(prefix + "q_a_layernorm.weight", config.q_lora_rank));
  KDT_ASSIGN_OR_RETURN(layer->kv_a_norm,
                       loader.Vector(prefix + "kv_a_layernorm.weight", config.kv_lora_rank));
  KDT_ASSIGN_OR_RETURN(layer->q_b, loader.Matrix({prefix + "q_b_proj.weight", heads * config.QkHeadDim(),
                                                  config.q_lora_rank, Split::kRows}));
  KDT_ASSIGN_OR_RETURN(
      const kernels::Tensor kv_b,
      loader.Matrix({prefix + "kv_b_proj.weight", heads * (config.qk_nope_head_dim + config.v_head_dim),
                     config.kv_lora_rank, Split::kRows}));
  layer->kv_b = kv_b.bf16();
  KDT_ASSIGN_OR_RETURN(layer->o, loader.Matrix({prefix + "o_proj.weight", hidden, heads * config.v_head_dim,
                                                Split::kColumns}));
  return absl::OkStatus();
}

absl::Status LoadMoe(const ModelConfig& config, MoeSharding sharding, const std::string& prefix,
                     WeightLoader& loader, TargetLayerWeights* layer) {
  const int64_t hidden = config.hidden_size;
  KDT_ASSIGN_OR_RETURN(layer->router,
                       loader.Matrix({prefix + "gate.weight", config.n_routed_experts, hidden}));
  KDT_ASSIGN_OR_RETURN(layer->router_bias,
                       loader.FloatVector(prefix + "gate.e_score_correction_bias", config.n_routed_experts));
  if (config.n_shared_experts > 0) {
    KDT_RETURN_IF_ERROR(LoadMlp(prefix + "shared_experts.", hidden,
                                config.n_shared_experts * config.moe_intermediate_size, loader, layer));
  }
  KDT_ASSIGN_OR_RETURN(layer->experts, loader.Experts(prefix + "experts.", config.n_routed_experts, hidden,
                                                      config.moe_intermediate_size, sharding));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TargetWeights> LoadTargetWeights(const ModelConfig& config, MoeSharding sharding,
                                                WeightLoader& loader) {
  const int64_t hidden = config.hidden_size;
  const std::string model = config.tensor_prefix + "model.";
  TargetWeights weights;
  KDT_ASSIGN_OR_RETURN(weights.embedding, loader.Matrix({model + "embed_tokens.weight", config.vocab_size,
                                                         hidden, Split::kRows}));
  weights.vocab_begin = loader.shard().Begin(config.vocab_size);
  KDT_ASSIGN_OR_RETURN(weights.rope_inv_freq, loader.Constants(config.rope.InvFreq()));
  for (int64_t l = 0; l < config.num_hidden_layers; ++l) {
    const std::string prefix = absl::StrCat(model, "layers.", l, ".");
    TargetLayerWeights layer;
    KDT_ASSIGN_OR_RETURN(layer.input_norm, loader.Vector(prefix + "input_layernorm.weight", hidden));
    KDT_RETURN_IF_ERROR(LoadAttention(config, prefix + "self_attn.", loader, &layer));
    KDT_ASSIGN_OR_RETURN(layer.post_norm, loader.Vector(prefix + "post_attention_layernorm.weight", hidden));
    if (config.IsMoeLayer(l)) {
      KDT_RETURN_IF_ERROR(LoadMoe(config, sharding, prefix + "mlp.", loader, &layer));
    } else {
      KDT_RETURN_IF_ERROR(LoadMlp(prefix + "mlp.", hidden, config.intermediate_size, loader, &layer));
    }
    weights.layers.push_back(layer);
  }
  KDT_ASSIGN_OR_RETURN(weights.final_norm, loader.Vector(model + "norm.weight", hidden));
  KDT_ASSIGN_OR_RETURN(weights.lm_head, loader.Matrix({config.tensor_prefix + "lm_head.weight",
                                                       config.vocab_size, hidden, Split::kRows}));
  weights.buffers = loader.TakeBuffers();
  return weights;
}

}  // namespace kdt
