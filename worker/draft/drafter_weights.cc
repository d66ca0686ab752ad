#include "worker/draft/drafter_weights.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace kdt {
namespace {

using Part = WeightLoader::Part;
using Split = WeightLoader::Split;

constexpr size_t kTensorsALayer = 11;
constexpr size_t kTensorsBesides = 3;  // fc, hidden_norm, norm

absl::StatusOr<DrafterLayerWeights> LoadLayer(const DrafterConfig& config, const std::string& prefix,
                                              WeightLoader& loader) {
  const int64_t hidden = config.hidden_size;
  const int64_t dim = config.head_dim;
  const int64_t q_width = config.num_attention_heads * dim;
  const std::string attention = prefix + "self_attn.";
  const std::string mlp = prefix + "mlp.";
  DrafterLayerWeights layer;
  KDT_ASSIGN_OR_RETURN(layer.input_norm, loader.Vector(prefix + "input_layernorm.weight", hidden));
  KDT_ASSIGN_OR_RETURN(layer.q, loader.Matrix({attention + "q_proj.weight", q_width, hidden, Split::kRows}));
  KDT_ASSIGN_OR_RETURN(layer.q_norm, loader.Vector(attention + "q_norm.weight", dim));
  KDT_ASSIGN_OR_RETURN(layer.k_norm, loader.Vector(attention + "k_norm.weight", dim));
  KDT_ASSIGN_OR_RETURN(layer.o,
                       loader.Matrix({attention + "o_proj.weight", hidden, q_width, Split::kColumns}));
  KDT_ASSIGN_OR_RETURN(layer.post_norm, loader.Vector(prefix + "post_attention_layernorm.weight", hidden));
  const Part gate_up[] = {{mlp + "gate_proj.weight", config.intermediate_size, hidden, Split::kRows},
                          {mlp + "up_proj.weight", config.intermediate_size, hidden, Split::kRows}};
  KDT_ASSIGN_OR_RETURN(layer.gate_up, loader.Matrix(gate_up));
  KDT_ASSIGN_OR_RETURN(layer.down, loader.Matrix({mlp + "down_proj.weight", hidden, config.intermediate_size,
                                                  Split::kColumns}));
  return layer;
}

}  // namespace

absl::StatusOr<DrafterWeights> LoadDrafterWeights(const DrafterConfig& config, const WeightSource& source,
                                                  WeightLoader& loader) {
  loader.SetSource(&source);
  const std::string prefix = source.Contains("model.fc.weight") ? "model." : "";
  const int64_t hidden = config.hidden_size;
  const int64_t features = static_cast<int64_t>(config.target_layer_ids.size());
  DrafterWeights weights;
  for (int64_t i = 0; i < features; ++i) {
    KDT_ASSIGN_OR_RETURN(
        const kernels::Tensor part,
        loader.ColumnRange(prefix + "fc.weight", hidden, features * hidden,
                           i * hidden + loader.shard().Begin(hidden), loader.shard().Count(hidden)));
    weights.fc.push_back(part);
  }
  KDT_ASSIGN_OR_RETURN(weights.hidden_norm, loader.Vector(prefix + "hidden_norm.weight", hidden));
  KDT_ASSIGN_OR_RETURN(weights.final_norm, loader.Vector(prefix + "norm.weight", hidden));
  KDT_ASSIGN_OR_RETURN(weights.rope_inv_freq, loader.Constants(config.rope.InvFreq()));
  const int64_t kv_width = config.num_key_value_heads * config.head_dim;
  std::vector<Part> kv;
  for (int64_t l = 0; l < config.num_hidden_layers; ++l) {
    for (const char* name : {"k_proj", "v_proj"}) {
      kv.push_back({absl::StrCat(prefix, "layers.", l, ".self_attn.", name, ".weight"), kv_width, hidden,
                    Split::kRows});
    }
  }
  KDT_ASSIGN_OR_RETURN(weights.kv, loader.Matrix(kv));
  for (int64_t l = 0; l < config.num_hidden_layers; ++l) {
    KDT_ASSIGN_OR_RETURN(DrafterLayerWeights layer,
                         LoadLayer(config, absl::StrCat(prefix, "layers.", l, "."), loader));
    weights.layers.push_back(layer);
  }
  const size_t expected = kTensorsBesides + kTensorsALayer * weights.layers.size();
  KDT_RETURN_IF_ERROR(source.CheckTensorCount(
      expected, "a drafter with more parts (such as a mask embedding of its own) is not supported"));
  weights.buffers = loader.TakeBuffers();
  return weights;
}

}  // namespace kdt
