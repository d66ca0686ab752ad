#include <cmath>

#include "common/drafter_config.h"
#include "common/json_config.h"
#include "common/model_config.h"
#include "tests/common/support.h"
#include "tests/support/catch.h"

namespace kdt {
namespace {

using Catch::Matchers::ContainsSubstring;

const std::string& ModelJson() {
  static const std::string text = ReadFile(KDT_GOLDENS_DIR "/model/config.json");
  return text;
}
const std::string& DrafterJson() {
  static const std::string text = ReadFile(KDT_GOLDENS_DIR "/drafter/config.json");
  return text;
}

std::string ModelError(const std::string& from, const std::string& to) {
  const std::string text = ReplaceOnce(ModelJson(), from, to);
  REQUIRE(!text.empty());
  const auto model = ModelConfig::Parse(text, "");
  return model.ok() ? "parsed" : std::string(model.status().message());
}

std::string DrafterError(const std::string& from, const std::string& to) {
  const std::string text = ReplaceOnce(DrafterJson(), from, to);
  REQUIRE(!text.empty());
  const auto drafter = DrafterConfig::Parse(text);
  return drafter.ok() ? "parsed" : std::string(drafter.status().message());
}

TEST_CASE("JsonConfig names file, path and fault") {
  const auto error = [](const std::string& text, auto read) {
    auto config = JsonConfig::Parse(text, "f.json");
    if (!config.ok()) return std::string(config.status().message());
    read(*config);
    return std::string(config->status().message());
  };
  const auto nothing = [](JsonConfig&) {};
  CHECK(
      error("{", nothing) ==
      "f.json: not valid JSON: line 1, column 2: expected a field's name in double quotes or '}', found the "
      "end of the text");
  CHECK_THAT(error("[1]", nothing), ContainsSubstring("not a JSON object"));
  CHECK_THAT(error(R"({"a":1,"a":2})", nothing), ContainsSubstring("\"a\" occurs twice"));
  CHECK_THAT(error("{\"a\":" + std::string(100, '[') + std::string(100, ']') + "}", nothing),
             ContainsSubstring("nested deeper"));
  CHECK(error(R"({"a":{"b":1},"c":{"b":1}})", nothing).empty());
  CHECK(error(R"({"a":"{[\"[["})", nothing).empty());
  CHECK(error("{}", [](JsonConfig& c) { c.Int("n", 1, 2); }) == "f.json: n is missing");
  CHECK(error(R"({"n":3})", [](JsonConfig& c) { c.Int("n", 1, 2); }) == "f.json: n must lie in 1 .. 2, is 3");
  CHECK(error(R"({"n":3})", [](JsonConfig& c) { c.Int("n", 1, 1); }) == "f.json: n must be 1, is 3");
  CHECK_THAT(error(R"({"n":"x"})", [](JsonConfig& c) { c.Int("n", 1, 2); }),
             ContainsSubstring("must be an integer"));
  CHECK_THAT(error(R"({"n":1.0})", [](JsonConfig& c) { c.Int("n", 1, 2); }),
             ContainsSubstring("must be an integer"));
  CHECK_THAT(error(R"({"n":18446744073709551615})", [](JsonConfig& c) { c.Int("n", -9, 9); }),
             ContainsSubstring("n must"));
  CHECK(error(R"({"n":1e999})", nothing) ==
        "f.json: not valid JSON: line 1, column 6: the number is too large");
  CHECK_THAT(error(R"({"a":{"n":5}})", [](JsonConfig& c) { c.Object("a").Int("n", 1, 2); }),
             ContainsSubstring("a.n must"));
  CHECK_THAT(error(R"({"l":[1,9]})", [](JsonConfig& c) { c.IntOrList("l", 1, 2); }),
             ContainsSubstring("l[1] must"));
  // The first fault stays.
  CHECK_THAT(error("{}", [](JsonConfig& c) { c.Int("n", 1, 2), c.Bool("b"); }),
             ContainsSubstring("n is missing"));
  CHECK(error(R"({"n":null})", [](JsonConfig& c) { c.IntOr("n", 7, 1, 2); }).empty());
}

TEST_CASE("files that cannot be read are named") {
  TempFolder folder;
  const auto error = [](const std::string& path) {
    return std::string(JsonConfig::Load(path).status().message());
  };
  CHECK_THAT(error(folder / "config.json"), ContainsSubstring("config.json: cannot be opened"));
  CHECK_THAT(error(folder.path()), ContainsSubstring(folder.path()));
  WriteFile(folder / "config.json", "");
  CHECK_THAT(error(folder / "config.json"), ContainsSubstring("config.json: not valid JSON"));
  std::filesystem::resize_file(folder / "config.json", (size_t{64} << 20) + 1);
  CHECK_THAT(error(folder / "config.json"), ContainsSubstring("larger than 64 MB"));
}

TEST_CASE("the reference model's config is read in full") {
  const auto model = ModelConfig::Load(KDT_GOLDENS_DIR "/model");
  REQUIRE(model.ok());
  CHECK(model->model_type == "kimi_k25");
  CHECK(model->tensor_prefix == "language_model.");
  CHECK(model->vocab_size == 1024);
  CHECK(model->hidden_size == 128);
  CHECK(model->num_hidden_layers == 3);
  CHECK(model->first_k_dense_replace == 1);
  CHECK_FALSE(model->IsMoeLayer(0));
  CHECK(model->IsMoeLayer(1));
  CHECK(model->num_attention_heads == 8);
  CHECK(model->q_lora_rank == 64);
  CHECK(model->kv_lora_rank == 512);
  CHECK(model->QkHeadDim() == 96);
  CHECK(model->v_head_dim == 32);
  CHECK(model->intermediate_size == 256);
  CHECK(model->moe_intermediate_size == 256);
  CHECK(model->n_routed_experts == 8);
  CHECK(model->num_experts_per_tok == 2);
  CHECK(model->n_shared_experts == 1);
  CHECK(model->routed_scaling_factor == 2.827);
  CHECK(model->rms_norm_eps == 1e-5);
  CHECK(model->max_position_embeddings == 262144);
  CHECK(model->int4_group_size == 32);
  CHECK(model->bos_token_id == 768);
  CHECK(model->pad_token_id == 1023);
  CHECK(model->eos_token_ids == std::vector<int64_t>{770});
  CHECK_FALSE(model->sampling.temperature.has_value());
  CHECK(model->CheckTensorParallel(8).ok());
  CHECK_THAT(std::string(model->CheckTensorParallel(3).message()), ContainsSubstring("tp must be"));
  const double mscale = 0.1 * std::log(64.0) + 1.0;
  CHECK(model->SoftmaxScale() == static_cast<float>(mscale * mscale / std::sqrt(96.0)));
}

TEST_CASE("flat configs, end tokens and sampling defaults") {
  const size_t begin = ModelJson().find("\"text_config\": {") + 15;
  const size_t end = ModelJson().rfind('}');
  const std::string flat = ModelJson().substr(begin, end - begin);
  const auto model = ModelConfig::Parse(
      flat,
      R"({"eos_token_id":[5,770],"temperature":0.6,"top_p":0.95,"top_k":20,"min_p":0.01,"do_sample":true})");
  REQUIRE(model.ok());
  CHECK(model->model_type == "kimi_k2");
  CHECK(model->tensor_prefix.empty());
  CHECK(model->eos_token_ids == std::vector<int64_t>{5, 770});
  CHECK(model->sampling.temperature == 0.6);
  CHECK(model->sampling.top_p == 0.95);
  CHECK(model->sampling.top_k == 20);
  CHECK(model->sampling.min_p == 0.01);
  CHECK(ModelConfig::Parse(flat, R"({"do_sample":false,"temperature":0.6})")->sampling.temperature == 0.0);
  for (const char* bad :
       {R"({"eos_token_id":1024})", R"({"eos_token_id":-1})", R"({"temperature":-1})", R"({"top_p":0})",
        R"({"top_p":1.5})", R"({"top_k":-1})", R"({"min_p":2})", R"({"eos_token_id":"x"})"}) {
    INFO(bad);
    const auto refused = ModelConfig::Parse(flat, bad);
    REQUIRE_FALSE(refused.ok());
    CHECK_THAT(std::string(refused.status().message()), ContainsSubstring("generation_config.json"));
  }
}

TEST_CASE("unsupported models are refused with the field's name") {
  const struct {
    const char *from, *to, *field;
  } cases[] = {
      {"kimi_k25", "llama", "model_type"},
      {"\"model_type\": \"kimi_k2\",", "\"model_type\": \"qwen3\",", "text_config.model_type"},
      {"KimiK25ForConditionalGeneration", "KimiK3ForCausalLM", "architectures"},
      {"DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "text_config.architectures"},
      {"\"n_group\": 1", "\"n_group\": 8", "n_group"},
      {"\"topk_group\": 1", "\"topk_group\": 4", "topk_group"},
      {"\"n_group\": 1", "\"index_topk\": 2048, \"n_group\": 1", "index_topk"},
      {"\"n_group\": 1", "\"sliding_window\": 4096, \"n_group\": 1", "sliding_window"},
      {"\"attention_bias\": false", "\"attention_bias\": true", "attention_bias"},
      {"\"silu\"", "\"gelu\"", "hidden_act"},
      {"\"sigmoid\"", "\"softmax\"", "scoring_func"},
      {"\"noaux_tc\"", "\"greedy\"", "topk_method"},
      {"\"moe_layer_freq\": 1", "\"moe_layer_freq\": 2", "moe_layer_freq"},
      {"\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true", "tie_word_embeddings"},
      {"\"pack-quantized\"", "\"float-quantized\"", "quantization_config.format"},
      {"\"compressed-tensors\"", "\"fp8\"", "quantization_config.quant_method"},
      {"\"num_bits\": 4", "\"num_bits\": 8", "weights.num_bits"},
      {"\"symmetric\": true", "\"symmetric\": false", "weights.symmetric"},
      {"\"group_size\": 32", "\"group_size\": 128", "weights.group_size"},
      {"\"actorder\": null", "\"actorder\": \"group\"", "weights.actorder"},
      {"\"quantization_config\"", "\"other_config\"", "quantization_config"},
      {"\"type\": \"yarn\"", "\"type\": \"longrope\"", "rope_scaling.type"},
      {"\"factor\": 64.0", "\"factor\": 0.5", "rope_scaling.factor"},
      {"\"num_key_value_heads\": 8", "\"num_key_value_heads\": 4", "num_key_value_heads"},
      {"\"vocab_size\": 1024", "\"vocab_size\": 0", "vocab_size"},
      {"\"vocab_size\": 1024", "\"vocab_size\": 1e3", "vocab_size"},
      {"\"hidden_size\": 128", "\"hidden_size\": -128", "hidden_size"},
      {"\"hidden_size\": 128", "\"hidden_size\": 120", "hidden_size"},
      {"\"hidden_size\": 128", "\"hidden_size\": 9223372036854775807", "hidden_size"},
      {"\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 9", "num_experts_per_tok"},
      {"\"first_k_dense_replace\": 1", "\"first_k_dense_replace\": 4", "first_k_dense_replace"},
      {"\"qk_rope_head_dim\": 64", "\"qk_rope_head_dim\": 63", "qk_rope_head_dim"},
      {"\"q_lora_rank\": 64", "\"q_lora_rank\": null", "q_lora_rank"},
      {"\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": 0", "rms_norm_eps"},
      {"\"torch_dtype\": \"bfloat16\",\n  \"quant", "\"torch_dtype\": \"float32\",\n  \"quant",
       "torch_dtype"},
      {"\"text_config\"", "\"other_config\"", "text_config"},
  };
  for (const auto& item : cases) {
    INFO(item.to);
    CHECK_THAT(ModelError(item.from, item.to), ContainsSubstring(item.field));
  }
}

TEST_CASE("tensor parallel sizes that do not divide are refused by name") {
  ModelConfig model = *ModelConfig::Load(KDT_GOLDENS_DIR "/model");
  model.moe_intermediate_size = 96;
  CHECK(model.CheckTensorParallel(1).ok());
  CHECK_THAT(std::string(model.CheckTensorParallel(2).message()), ContainsSubstring("moe_intermediate_size"));
  model.num_attention_heads = 4;
  CHECK_THAT(std::string(model.CheckTensorParallel(8).message()), ContainsSubstring("num_attention_heads"));
}

TEST_CASE("rope frequencies follow the reference") {
  RopeConfig plain{.theta = 10000.0, .dim = 64};
  const std::vector<float> inv = plain.InvFreq();
  REQUIRE(inv.size() == 32);
  CHECK(inv[0] == 1.0f);
  CHECK(inv[16] == Catch::Approx(0.01).epsilon(1e-6));
  CHECK(plain.AttentionFactor() == 1.0f);

  // Pairs that turn often keep their frequency, slow ones are divided by the factor. For theta 50000, width
  // 64, original 4096 positions: 32 turns at pair 8.9 -> 8, one turn at pair 19.2 -> 20; between them a
  // linear ramp.
  RopeConfig yarn{
      .theta = 50000.0, .dim = 64, .yarn = YarnScaling{.factor = 64.0, .mscale = 1.0, .mscale_all_dim = 1.0}};
  const std::vector<float> scaled = yarn.InvFreq();
  for (int i = 0; i < 32; ++i) {
    const double base = std::pow(50000.0, -2.0 * i / 64.0);
    const double ramp = std::min(1.0, std::max(0.0, (i - 8.0) / 12.0));
    CHECK(scaled[static_cast<size_t>(i)] ==
          Catch::Approx(base * (1.0 - ramp) + base / 64.0 * ramp).epsilon(2e-6));
  }
  CHECK(yarn.AttentionFactor() == 1.0f);
  yarn.yarn->mscale_all_dim = 0.0;
  CHECK(yarn.AttentionFactor() == Catch::Approx(1.0 + 0.1 * std::log(64.0)));
}

TEST_CASE("the reference drafter's config is read and fits its target") {
  const auto drafter = DrafterConfig::Load(KDT_GOLDENS_DIR "/drafter");
  REQUIRE(drafter.ok());
  CHECK(drafter->block_size == 8);
  CHECK(drafter->mask_token_id == 1022);
  CHECK(drafter->target_layer_ids == std::vector<int64_t>{0, 1});
  CHECK(drafter->num_attention_heads == 16);
  CHECK(drafter->num_key_value_heads == 8);
  CHECK(drafter->head_dim == 64);
  CHECK(drafter->SoftmaxScale() == 0.125f);
  CHECK(drafter->rope.AttentionFactor() == 1.0f);
  CHECK(drafter->CheckTensorParallel(8).ok());
  const ModelConfig target = *ModelConfig::Load(KDT_GOLDENS_DIR "/model");
  CHECK(CheckFits(*drafter, target).ok());
  const auto misfit = [&](auto change) {
    DrafterConfig changed = *drafter;
    change(changed);
    return std::string(CheckFits(changed, target).message());
  };
  CHECK_THAT(misfit([](DrafterConfig& d) { d.hidden_size = 256; }), ContainsSubstring("hidden_size"));
  CHECK_THAT(misfit([](DrafterConfig& d) { d.vocab_size = 2048; }), ContainsSubstring("vocab_size"));
  CHECK_THAT(misfit([](DrafterConfig& d) { d.num_target_layers = 61; }),
             ContainsSubstring("num_target_layers"));
  CHECK_THAT(misfit([](DrafterConfig& d) {
               d.target_layer_ids = {0, 58};
             }),
             ContainsSubstring("target_layer_ids"));
}

TEST_CASE("unsupported drafters are refused with the field's name") {
  const struct {
    const char *from, *to, *field;
  } cases[] = {
      {"\"DFlashDraftModel\"", "\"DFlash2DraftModel\"", "architectures"},
      {"\"qwen3\"", "\"llama\"", "model_type"},
      {"\"block_size\": 8", "\"layer_types\": [\"full_attention\",\"sliding_attention\"], \"block_size\": 8",
       "layer_types"},
      {"\"block_size\": 8", "\"sliding_window\": 2048, \"block_size\": 8", "sliding_window"},
      {"\"block_size\": 8", "\"use_sliding_window\": true, \"block_size\": 8", "use_sliding_window"},
      {"\"block_size\": 8", "\"use_mask_embedding\": true, \"block_size\": 8", "use_mask_embedding"},
      {"\"block_size\": 8", "\"anchor_size\": 2, \"block_size\": 8", "anchor_size"},
      {"\"block_size\": 8", "\"context_window\": 4096, \"block_size\": 8", "context_window"},
      {"\"block_size\": 8", "\"block_size\": 1", "block_size"},
      {"\"mask_token_id\": 1022", "\"mask_token_id\": 1024", "dflash_config.mask_token_id"},
      {"\"mask_token_id\": 1022", "\"mask_token_id\": 1022, \"mask_embedding\": true",
       "dflash_config.mask_embedding"},
      {"\"mask_token_id\": 1022", "\"mask_token_id\": 1022, \"variant\": \"x\"", "dflash_config.variant"},
      {"   0,\n   1", "   0,\n   3", "target_layer_ids"},
      {"   0,\n   1", "   1,\n   1", "target_layer_ids"},
      {"   0,\n   1", "", "target_layer_ids"},
      {"\"attention_bias\": false", "\"attention_bias\": true", "attention_bias"},
      {"\"silu\"", "\"gelu\"", "hidden_act"},
      {"\"num_key_value_heads\": 8", "\"num_key_value_heads\": 5", "num_key_value_heads"},
      {"\"head_dim\": 64", "\"head_dim\": 63", "head_dim"},
      {"\"dflash_config\"", "\"other\"", "dflash_config"},
      {"\"yarn\"", "\"dynamic\"", "rope_scaling.rope_type"},
  };
  for (const auto& item : cases) {
    INFO(item.to);
    CHECK_THAT(DrafterError(item.from, item.to), ContainsSubstring(item.field));
  }
}

}  // namespace
}  // namespace kdt
