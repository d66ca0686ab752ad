#include "common/model_config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>

#include "absl/strings/str_cat.h"
#include "common/json_config.h"
#include "common/status.h"

namespace kdt {
namespace {

constexpr int64_t kMaxWidth = int64_t{1} << 20;  // hidden and intermediate sizes, ranks
constexpr int64_t kMaxHeads = 4096;
constexpr int64_t kMaxHeadDim = 4096;
constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxExperts = 65536;
constexpr int64_t kMaxVocab = int64_t{1} << 24;
constexpr int64_t kMaxPositions = int64_t{1} << 31;
constexpr int64_t kInt4Group = 32;

void RequireString(JsonConfig& config, absl::string_view key, absl::string_view only) {
  const std::string value = config.StringOr(key, only);
  if (value != only)
    config.Fail(key, absl::StrCat("\"", value, "\" is not supported, only \"", only, "\" is"));
}

void RequireArchitecture(JsonConfig& config, const std::set<std::string>& known) {
  if (!config.Has("architectures")) return;
  for (const std::string& name : config.StringList("architectures")) {
    if (known.count(name) == 0) config.Fail("architectures", absl::StrCat("\"", name, "\" is not supported"));
  }
}

// What other models of the family add. Ignoring one of these would give wrong text without a word.
void RefuseVariants(JsonConfig& config) {
  for (const char* key :
       {"index_topk", "index_n_heads", "index_head_dim", "sparse_attention", "nsa_config"}) {
    config.RefuseIfSet(key, "is set: sparse attention is not supported");
  }
  for (const char* key : {"sliding_window", "use_sliding_window", "layer_types"}) {
    config.RefuseIfSet(key, "is set: sliding or mixed attention layers are not supported");
  }
  config.RefuseIfSet("linear_attn_config", "is set: linear attention is not supported");
  config.RefuseIfSet("attention_bias", "is set: biases in attention are not supported");
  config.RefuseIfSet("mlp_bias", "is set: biases in the MLP are not supported");
  config.RefuseIfSet("tie_word_embeddings", "is set: tied embeddings are not supported");
  config.RefuseIfSet("swiglu_limit", "is set: a clamped SwiGLU is not supported");
  config.RefuseIfSet("use_qk_norm", "is set: q/k norms are not supported");
  config.RefuseIfSet("qk_layernorm", "is set: q/k norms are not supported");
  if (!config.BoolOr("rope_interleave", true)) config.Fail("rope_interleave", "must be true");
  RequireString(config, "hidden_act", "silu");
  RequireString(config, "scoring_func", "sigmoid");
  RequireString(config, "topk_method", "noaux_tc");
  RequireString(config, config.Has("dtype") ? "dtype" : "torch_dtype", "bfloat16");
  config.IntOr("moe_layer_freq", 1, 1, 1);
  // Extra prediction layers are not part of the model's own output; their tensors are simply not read.
  config.IntOr("num_nextn_predict_layers", 0, 0, 64);
}

// Returns the group size of the routed experts' INT4.
int64_t ReadQuantization(JsonConfig quantization) {
  RequireString(quantization, "quant_method", "compressed-tensors");
  RequireString(quantization, "format", "pack-quantized");
  quantization.RefuseIfSet("kv_cache_scheme", "is set: a quantized KV cache is not supported");
  quantization.RefuseIfSet("sparsity_config", "is set: sparse weights are not supported");
  JsonConfig groups = quantization.Object("config_groups");
  const std::vector<std::string> names = groups.Keys();
  if (names.size() != 1) {
    quantization.Fail("config_groups", absl::StrCat("must have one group, has ", names.size()));
    return kInt4Group;
  }
  JsonConfig group = groups.Object(names.front());
  group.RefuseIfSet("input_activations", "is set: quantized activations are not supported");
  group.RefuseIfSet("output_activations", "is set: quantized activations are not supported");
  JsonConfig weights = group.Object("weights");
  weights.Int("num_bits", 4, 4);
  RequireString(weights, "type", "int");
  RequireString(weights, "strategy", "group");
  if (!weights.Bool("symmetric")) weights.Fail("symmetric", "must be true");
  weights.RefuseIfSet("actorder", "is set: reordered groups are not supported");
  weights.RefuseIfSet("dynamic", "is set: dynamic weight scales are not supported");
  weights.RefuseIfSet("block_structure", "is set: blocks are not supported");
  return weights.Int("group_size", kInt4Group, kInt4Group);
}

void ReadSizes(JsonConfig& config, ModelConfig* model) {
  model->vocab_size = config.Int("vocab_size", 1, kMaxVocab);
  model->hidden_size = config.Int("hidden_size", 1, kMaxWidth);
  model->num_hidden_layers = config.Int("num_hidden_layers", 1, kMaxLayers);
  model->first_k_dense_replace = config.Int("first_k_dense_replace", 0, model->num_hidden_layers);
  model->num_attention_heads = config.Int("num_attention_heads", 1, kMaxHeads);
  config.IntOr("num_key_value_heads", model->num_attention_heads, model->num_attention_heads,
               model->num_attention_heads);
  model->q_lora_rank = config.Int("q_lora_rank", 1, kMaxWidth);
  model->kv_lora_rank = config.Int("kv_lora_rank", 1, kMaxWidth);
  model->qk_nope_head_dim = config.Int("qk_nope_head_dim", 1, kMaxHeadDim);
  model->qk_rope_head_dim = config.Int("qk_rope_head_dim", 2, kMaxHeadDim);
  if (model->qk_rope_head_dim % 2 != 0) config.Fail("qk_rope_head_dim", "must be even");
  model->v_head_dim = config.Int("v_head_dim", 1, kMaxHeadDim);
  model->intermediate_size = config.Int("intermediate_size", 1, kMaxWidth);
  model->moe_intermediate_size = config.Int("moe_intermediate_size", 1, kMaxWidth);
  model->n_routed_experts = config.Int("n_routed_experts", 1, kMaxExperts);
  model->num_experts_per_tok = config.Int("num_experts_per_tok", 1, model->n_routed_experts);
  model->n_shared_experts = config.IntOr("n_shared_experts", 0, 0, 64);
  config.Int("n_group", 1, 1);
  config.Int("topk_group", 1, 1);
  model->norm_topk_prob = config.BoolOr("norm_topk_prob", true);
  model->routed_scaling_factor = config.NumberOr("routed_scaling_factor", 1.0, 1e-6, 1e6);
  model->rms_norm_eps = config.Number("rms_norm_eps", 1e-12, 1.0);
  model->max_position_embeddings = config.Int("max_position_embeddings", 1, kMaxPositions);
  model->rope = ReadRope(config, model->qk_rope_head_dim);
}

void CheckInt4Widths(JsonConfig& config, const ModelConfig& model) {
  for (const char* key : {"hidden_size", "moe_intermediate_size"}) {
    const int64_t width = key[0] == 'h' ? model.hidden_size : model.moe_intermediate_size;
    if (width % model.int4_group_size != 0) {
      config.Fail(key,
                  absl::StrCat(width, " is not a multiple of the INT4 group size ", model.int4_group_size));
    }
  }
}

void AddEos(JsonConfig& config, ModelConfig* model) {
  if (!config.Has("eos_token_id")) return;
  const std::vector<int64_t> ids = config.IntOrList("eos_token_id", 0, model->vocab_size - 1);
  std::set<int64_t> all(model->eos_token_ids.begin(), model->eos_token_ids.end());
  all.insert(ids.begin(), ids.end());
  model->eos_token_ids.assign(all.begin(), all.end());
}

void ReadSamplingDefaults(JsonConfig& config, SamplingDefaults* sampling) {
  if (config.Has("temperature")) sampling->temperature = config.Number("temperature", 0.0, 100.0);
  // An explicit do_sample=false means greedy, whatever temperature stands beside it.
  if (!config.BoolOr("do_sample", true)) sampling->temperature = 0.0;
  if (config.Has("top_p")) sampling->top_p = config.Number("top_p", 1e-6, 1.0);
  if (config.Has("top_k")) sampling->top_k = config.Int("top_k", 0, kMaxVocab);
  if (config.Has("min_p")) sampling->min_p = config.Number("min_p", 0.0, 1.0);
  if (config.Has("repetition_penalty")) {
    sampling->repetition_penalty = config.Number("repetition_penalty", 1e-6, 100.0);
  }
  if (config.Has("max_new_tokens")) sampling->max_new_tokens = config.Int("max_new_tokens", 1, kMaxPositions);
}

absl::StatusOr<ModelConfig> Read(JsonConfig outer, std::optional<JsonConfig> generation) {
  ModelConfig model;
  model.model_type = outer.String("model_type");
  KDT_RETURN_IF_ERROR(outer.status());
  JsonConfig config = outer;
  if (model.model_type == "kimi_k25") {
    RequireArchitecture(outer, {"KimiK25ForConditionalGeneration"});
    outer.RefuseIfSet("tie_word_embeddings", "is set: tied embeddings are not supported");
    model.tensor_prefix = "language_model.";
    config = outer.Object("text_config");
    const std::string inner = config.String("model_type");
    if (inner != "kimi_k2" && inner != "deepseek_v3") {
      config.Fail("model_type",
                  absl::StrCat("\"", inner, "\" is not supported, only kimi_k2 and deepseek_v3 are"));
    }
  } else if (model.model_type != "kimi_k2" && model.model_type != "deepseek_v3") {
    outer.Fail("model_type", absl::StrCat("\"", model.model_type,
                                          "\" is not supported, only kimi_k25, kimi_k2 and deepseek_v3 are"));
  }
  KDT_RETURN_IF_ERROR(outer.status());
  RequireArchitecture(config, {"DeepseekV3ForCausalLM", "KimiK2ForCausalLM"});
  RefuseVariants(config);
  ReadSizes(config, &model);
  JsonConfig& quantized = config.Has("quantization_config") ? config : outer;
  if (quantized.Has("quantization_config")) {
    model.int4_group_size = ReadQuantization(quantized.Object("quantization_config"));
    CheckInt4Widths(config, model);
  } else {
    config.Fail("quantization_config", "is missing: routed experts must be INT4 pack-quantized");
  }
  JsonConfig& tokens = config.Has("bos_token_id") ? config : outer;
  model.bos_token_id = tokens.IntOr("bos_token_id", -1, 0, model.vocab_size - 1);
  model.pad_token_id = tokens.IntOr("pad_token_id", -1, 0, model.vocab_size - 1);
  AddEos(outer, &model);
  AddEos(config, &model);
  KDT_RETURN_IF_ERROR(outer.status());
  if (generation) {
    AddEos(*generation, &model);
    ReadSamplingDefaults(*generation, &model.sampling);
    KDT_RETURN_IF_ERROR(generation->status());
  }
  return model;
}

}  // namespace

float ModelConfig::SoftmaxScale() const {
  double scale = 1.0 / std::sqrt(static_cast<double>(QkHeadDim()));
  if (rope.yarn && rope.yarn->mscale_all_dim != 0.0) {
    const double mscale = YarnMscale(rope.yarn->factor, rope.yarn->mscale_all_dim);
    scale *= mscale * mscale;
  }
  return static_cast<float>(scale);
}

absl::StatusOr<ModelConfig> ModelConfig::Load(const std::string& folder) {
  const std::filesystem::path base(folder);
  KDT_ASSIGN_OR_RETURN(JsonConfig config, JsonConfig::Load((base / "config.json").string()));
  std::optional<JsonConfig> generation;
  const std::string generation_path = (base / "generation_config.json").string();
  std::error_code ec;
  if (std::filesystem::exists(generation_path, ec)) {
    KDT_ASSIGN_OR_RETURN(generation, JsonConfig::Load(generation_path));
  }
  return Read(std::move(config), std::move(generation));
}

absl::StatusOr<ModelConfig> ModelConfig::Parse(const std::string& config_json,
                                               const std::string& generation_json) {
  KDT_ASSIGN_OR_RETURN(JsonConfig config, JsonConfig::Parse(config_json, "config.json"));
  std::optional<JsonConfig> generation;
  if (!generation_json.empty()) {
    KDT_ASSIGN_OR_RETURN(generation, JsonConfig::Parse(generation_json, "generation_config.json"));
  }
  return Read(std::move(config), std::move(generation));
}

absl::Status ModelConfig::CheckTensorParallel(int64_t tp, bool whole_experts) const {
  if (tp != 1 && tp != 2 && tp != 4 && tp != 8) {
    return absl::InvalidArgumentError(absl::StrCat("tp must be 1, 2, 4 or 8, is ", tp));
  }
  struct Field {
    const char* name;
    int64_t value, unit;
  };
  const Field split[] = {{"num_attention_heads", num_attention_heads, 1},
                         {"vocab_size", vocab_size, 1},
                         {"intermediate_size", intermediate_size, 1},
                         whole_experts ? Field{"n_routed_experts", n_routed_experts, 1}
                                       // A rank's slice of an expert's input must hold whole INT4 groups.
                                       : Field{"moe_intermediate_size", moe_intermediate_size,
                                               std::max<int64_t>(int4_group_size, 1)},
                         // Shared experts are cut by their width in either case.
                         {"moe_intermediate_size", n_shared_experts * moe_intermediate_size, 1}};
  for (const auto& field : split) {
    if (field.value % (tp * field.unit) == 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(field.name, " ", field.value, " cannot be split over ", tp, " ranks",
                     field.unit > 1 ? absl::StrCat(" in groups of ", field.unit) : std::string()));
  }
  return absl::OkStatus();
}

}  // namespace kdt
