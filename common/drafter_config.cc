#include "common/drafter_config.h"

#include <cmath>
#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/json_config.h"
#include "common/model_config.h"
#include "common/status.h"

namespace kdt {
namespace {

constexpr int64_t kMaxWidth = int64_t{1} << 20;
constexpr int64_t kMaxBlock = 256;
constexpr int64_t kMaxLayers = 4096;

void RequireArchitecture(JsonConfig& config) {
  for (const std::string& name : config.StringList("architectures")) {
    if (name != "DFlashDraftModel") {
      config.Fail("architectures",
                  absl::StrCat("\"", name, "\" is not supported, only \"DFlashDraftModel\" is"));
    }
  }
}

// DFlash has relatives that change what a block is or what it sees. Each names itself in config.json by keys
// that this engine does not know; a drafter that is run in another way than it was trained in accepts next to
// nothing.
void RefuseVariants(JsonConfig& config) {
  if (config.Has("layer_types")) {
    for (const std::string& type : config.StringList("layer_types")) {
      if (type != "full_attention")
        config.Fail("layer_types", absl::StrCat("\"", type, "\" is not supported"));
    }
  }
  config.RefuseIfSet("use_sliding_window", "is set: sliding layers are not supported");
  // Qwen3 configs may carry a width beside use_sliding_window=false; alone it would mean sliding layers.
  if (!config.Has("use_sliding_window")) {
    config.RefuseIfSet("sliding_window", "is set: sliding layers are not supported");
  }
  for (const std::string& key : config.Keys()) {
    if (key == "dflash_config" || key == "sliding_window" || key == "use_sliding_window" ||
        key == "max_window_layers") {
      continue;
    }
    for (const char* part : {"mask_embed", "anchor", "window", "dflash", "markov", "causal"}) {
      if (absl::StrContains(key, part)) config.RefuseIfSet(key, "is not supported");
    }
  }
  config.RefuseIfSet("attention_bias", "is set: biases in attention are not supported");
  config.RefuseIfSet("mlp_bias", "is set: biases in the MLP are not supported");
  const std::string act = config.StringOr("hidden_act", "silu");
  if (act != "silu")
    config.Fail("hidden_act", absl::StrCat("\"", act, "\" is not supported, only \"silu\" is"));
  const char* dtype_key = config.Has("dtype") ? "dtype" : "torch_dtype";
  const std::string dtype = config.StringOr(dtype_key, "bfloat16");
  if (dtype != "bfloat16")
    config.Fail(dtype_key, absl::StrCat("\"", dtype, "\" is not supported, only \"bfloat16\" is"));
  config.RefuseIfSet("quantization_config", "is set: quantized drafters are not supported");
}

void ReadDflash(JsonConfig dflash, DrafterConfig* drafter) {
  for (const std::string& key : dflash.Keys()) {
    if (key != "mask_token_id" && key != "target_layer_ids") dflash.RefuseIfSet(key, "is not supported");
  }
  drafter->mask_token_id = dflash.Int("mask_token_id", 0, drafter->vocab_size - 1);
  drafter->target_layer_ids = dflash.IntOrList("target_layer_ids", 0, drafter->num_target_layers - 1);
  if (drafter->target_layer_ids.empty()) dflash.Fail("target_layer_ids", "is empty");
  for (size_t i = 1; i < drafter->target_layer_ids.size(); ++i) {
    if (drafter->target_layer_ids[i] <= drafter->target_layer_ids[i - 1]) {
      dflash.Fail("target_layer_ids", "must be strictly rising");
    }
  }
}

absl::StatusOr<DrafterConfig> Read(JsonConfig config) {
  DrafterConfig drafter;
  RequireArchitecture(config);
  const std::string type = config.String("model_type");
  if (type != "qwen3")
    config.Fail("model_type", absl::StrCat("\"", type, "\" is not supported, only \"qwen3\" is"));
  RefuseVariants(config);
  drafter.vocab_size = config.Int("vocab_size", 1, int64_t{1} << 24);
  drafter.hidden_size = config.Int("hidden_size", 1, kMaxWidth);
  drafter.num_hidden_layers = config.Int("num_hidden_layers", 1, kMaxLayers);
  drafter.num_attention_heads = config.Int("num_attention_heads", 1, 4096);
  drafter.num_key_value_heads = config.Int("num_key_value_heads", 1, drafter.num_attention_heads);
  if (drafter.num_attention_heads % drafter.num_key_value_heads != 0) {
    config.Fail("num_key_value_heads", "must divide num_attention_heads");
  }
  drafter.head_dim = config.Int("head_dim", 2, 4096);
  if (drafter.head_dim % 2 != 0) config.Fail("head_dim", "must be even");
  drafter.intermediate_size = config.Int("intermediate_size", 1, kMaxWidth);
  drafter.rms_norm_eps = config.Number("rms_norm_eps", 1e-12, 1.0);
  drafter.max_position_embeddings = config.Int("max_position_embeddings", 1, int64_t{1} << 31);
  drafter.block_size = config.Int("block_size", 2, kMaxBlock);
  drafter.num_target_layers = config.Int("num_target_layers", 1, kMaxLayers);
  ReadDflash(config.Object("dflash_config"), &drafter);
  drafter.rope = ReadRope(config, drafter.head_dim);
  KDT_RETURN_IF_ERROR(config.status());
  return drafter;
}

}  // namespace

float DrafterConfig::SoftmaxScale() const {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
}

absl::StatusOr<DrafterConfig> DrafterConfig::Load(const std::string& folder) {
  const std::string path = (std::filesystem::path(folder) / "config.json").string();
  KDT_ASSIGN_OR_RETURN(JsonConfig config, JsonConfig::Load(path));
  return Read(std::move(config));
}

absl::StatusOr<DrafterConfig> DrafterConfig::Parse(const std::string& config_json) {
  KDT_ASSIGN_OR_RETURN(JsonConfig config, JsonConfig::Parse(config_json, "config.json"));
  return Read(std::move(config));
}

absl::Status DrafterConfig::CheckTensorParallel(int64_t tp) const {
  if (tp != 1 && tp != 2 && tp != 4 && tp != 8) {
    return absl::InvalidArgumentError(absl::StrCat("tp must be 1, 2, 4 or 8, is ", tp));
  }
  const struct {
    const char* name;
    int64_t value;
  } split[] = {{"num_attention_heads", num_attention_heads},
               {"num_key_value_heads", num_key_value_heads},
               {"intermediate_size", intermediate_size}};
  for (const auto& field : split) {
    if (field.value % tp == 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("drafter ", field.name, " ", field.value, " cannot be split over ", tp, " ranks"));
  }
  return absl::OkStatus();
}

absl::Status CheckFits(const DrafterConfig& drafter, const ModelConfig& target) {
  const struct {
    const char* name;
    int64_t drafter, target;
  } pairs[] = {{"hidden_size", drafter.hidden_size, target.hidden_size},
               {"vocab_size", drafter.vocab_size, target.vocab_size},
               {"num_target_layers", drafter.num_target_layers, target.num_hidden_layers}};
  for (const auto& pair : pairs) {
    if (pair.drafter == pair.target) continue;
    return absl::InvalidArgumentError(absl::StrCat("drafter does not fit the target: ", pair.name, " is ",
                                                   pair.drafter, ", the target has ", pair.target));
  }
  for (const int64_t layer : drafter.target_layer_ids) {
    if (layer < target.num_hidden_layers) continue;
    return absl::InvalidArgumentError(absl::StrCat("drafter does not fit the target: target_layer_ids has ",
                                                   layer, ", the target has ", target.num_hidden_layers,
                                                   " layers"));
  }
  if (drafter.mask_token_id >= target.vocab_size) {
    return absl::InvalidArgumentError(absl::StrCat("drafter does not fit the target: mask_token_id is ",
                                                   drafter.mask_token_id, ", the target's vocabulary has ",
                                                   target.vocab_size));
  }
  return absl::OkStatus();
}

}  // namespace kdt
