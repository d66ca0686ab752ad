#include "worker/engine/target_forward.h"

#include <algorithm>
#include <utility>

#include "common/status.h"

namespace kdt {
namespace {

// The norms of the two latents do not take rms_norm_eps: the models' own code (and transformers' DeepseekV3)
// builds them with this default, and the reference logits are five times nearer with it.
constexpr float kLatentNormEps = 1e-6f;

}  // namespace

using kernels::Buffer;
using kernels::MakeTensor;
using kernels::Tensor;

absl::StatusOr<std::unique_ptr<TargetForward>> TargetForward::Create(
    kernels::Backend* backend, const ModelConfig* config, const TargetWeights* weights, const KvStorage* kv,
    Shard shard, int64_t max_rows, AttentionCheck* attention, MoeSharding sharding) {
  auto forward = std::unique_ptr<TargetForward>(new TargetForward);
  forward->backend_ = backend;
  forward->config_ = config;
  forward->weights_ = weights;
  forward->kv_ = kv;
  forward->attention_ = attention;
  forward->heads_ = shard.Count(config->num_attention_heads);
  forward->max_rows_ = max_rows;
  forward->softmax_scale_ = config->SoftmaxScale();
  forward->rope_factor_ = config->rope.AttentionFactor();
  // With slices of every expert all ranks read the same.
  forward->expert_load_ = ExpertLoad(sharding == MoeSharding::kExpert ? shard.size : 1);
  for (const TargetLayerWeights& layer : weights->layers) {
    if (layer.experts.experts == 0) continue;
    forward->expert_load_.AddLayer(&layer, config->n_routed_experts);
    ++forward->moe_layers_;
  }

  int64_t inner = 0;
  for (const TargetLayerWeights& layer : weights->layers) inner = std::max(inner, layer.down.cols);
  const int64_t size = kernels::DTypeSize(backend->activation_dtype());
  const int64_t latent = config->kv_lora_rank;
  const int64_t rope = config->qk_rope_head_dim;
  const std::pair<Buffer*, int64_t> widths[] = {
      {&forward->residual_, config->hidden_size * size},
      {&forward->branch_, config->hidden_size * size},
      {&forward->normed_, config->hidden_size * size},
      {&forward->qkv_a_, (config->q_lora_rank + latent + rope) * size},
      {&forward->q_, forward->heads_ * config->QkHeadDim() * size},
      {&forward->absorbed_, forward->heads_ * (latent + rope) * size},
      {&forward->attended_, forward->heads_ * latent * size},
      {&forward->values_, forward->heads_ * config->v_head_dim * size},
      {&forward->gate_up_, 2 * inner * size},
      {&forward->expert_ids_, forward->moe_layers_ * config->num_experts_per_tok * int64_t{sizeof(int32_t)}},
      {&forward->scores_, forward->moe_layers_ > 0 ? config->n_routed_experts * int64_t{sizeof(float)} : 0},
      {&forward->expert_weights_, config->num_experts_per_tok * int64_t{sizeof(float)}},
      {&forward->logits_, weights->lm_head.rows * int64_t{sizeof(float)}},
  };
  for (const auto& [buffer, row_bytes] : widths) {
    if (row_bytes == 0) continue;  // no MoE layer, or no MLP beside the experts
    KDT_ASSIGN_OR_RETURN(*buffer, Buffer::Make(*backend, row_bytes * max_rows));
  }
  if (forward->moe_layers_ > 0 && backend->name() != "cpu") {
    KDT_ASSIGN_OR_RETURN(forward->expert_host_,
                         kernels::HostBuffer::Make(*backend, forward->expert_ids_.bytes()));
  }
  return forward;
}

absl::Status TargetForward::Embed(const int32_t* tokens, const Tensor& out, Collective& collective) {
  KDT_RETURN_IF_ERROR(backend_->Embedding({tokens, weights_->vocab_begin, weights_->embedding, out}));
  return collective.AllReduceSum(out);
}

absl::Status TargetForward::Run(const StepRows& rows, Collective& collective, const LayerHook& hook,
                                PhaseTimes* times) {
  KDT_CHECK(rows.rows > 0 && rows.rows <= max_rows_);
  moe_layer_ = 0;
  const kernels::DType dtype = backend_->activation_dtype();
  const int64_t hidden = config_->hidden_size;
  const float eps = static_cast<float>(config_->rms_norm_eps);
  const Tensor residual = MakeTensor(residual_.data(), dtype, rows.rows, hidden);
  const Tensor branch = MakeTensor(branch_.data(), dtype, rows.rows, hidden);
  const Tensor normed = MakeTensor(normed_.data(), dtype, rows.rows, hidden);

  KDT_RETURN_IF_ERROR(Embed(rows.tokens, residual, collective));
  const auto layers = static_cast<int64_t>(weights_->layers.size());
  const auto qkv_a = [&](const TargetLayerWeights& layer) -> kernels::GemmArgs {
    return {normed, layer.qkv_a, MakeTensor(qkv_a_.data(), dtype, rows.rows, layer.qkv_a.rows)};
  };
  KDT_RETURN_IF_ERROR(backend_->RmsNorm({residual, {}, weights_->layers[0].input_norm, eps, normed}));
  KDT_RETURN_IF_ERROR(backend_->Gemm(qkv_a(weights_->layers[0])));
  KDT_RETURN_IF_ERROR(hook(-1, residual));
  for (int64_t l = 0; l < layers; ++l) {
    const TargetLayerWeights& layer = weights_->layers[l];
    KDT_RETURN_IF_ERROR(Attention(l, rows, times));
    KDT_RETURN_IF_ERROR(
        Mlp(layer, rows, {branch, residual, layer.post_norm, eps, normed}, collective, times));
    // The layer's output is complete with the next one's first norm.
    if (l + 1 < layers) {
      const TargetLayerWeights& next = weights_->layers[l + 1];
      KDT_RETURN_IF_ERROR(collective.AllReduceNormGemm(
          *backend_, {branch, residual, next.input_norm, eps, normed}, qkv_a(next)));
    } else {
      KDT_RETURN_IF_ERROR(collective.AllReduceSum(branch));
      KDT_RETURN_IF_ERROR(backend_->Add({branch, residual}));
    }
    KDT_RETURN_IF_ERROR(hook(l, residual));
  }
  return absl::OkStatus();
}

// qkv_a -> branch (this rank's heads only).
absl::Status TargetForward::Attention(int64_t l, const StepRows& rows, PhaseTimes* times) {
  PhaseTimer timer(&times->attention_ns);
  const TargetLayerWeights& layer = weights_->layers[l];
  const kernels::DType dtype = backend_->activation_dtype();
  const int64_t n = rows.rows;
  const int64_t q_lora = config_->q_lora_rank;
  const int64_t latent = config_->kv_lora_rank;
  const int64_t nope = config_->qk_nope_head_dim;
  const int64_t rope = config_->qk_rope_head_dim;
  const int64_t v = config_->v_head_dim;

  const Tensor qkv_a = MakeTensor(qkv_a_.data(), dtype, n, q_lora + latent + rope);
  const Tensor q = MakeTensor(q_.data(), dtype, n, heads_ * (nope + rope));
  const Tensor absorbed = MakeTensor(absorbed_.data(), dtype, n, heads_ * (latent + rope));
  KDT_RETURN_IF_ERROR(
      backend_->MlaQuery({{qkv_a, q_lora, latent, rope, layer.q_a_norm, layer.kv_a_norm, kLatentNormEps,
                           rows.positions, weights_->rope_inv_freq, rope_factor_, rows.slots, kv_->Layer(l)},
                          layer.q_b,
                          {q, layer.kv_b, heads_, nope, rope, v, latent, absorbed, rows.positions,
                           weights_->rope_inv_freq, rope_factor_}}));

  const Tensor attended = MakeTensor(attended_.data(), dtype, n, heads_ * latent);
  const kernels::VerifyAttentionArgs keys = {absorbed,
                                             kv_->Layer(l),
                                             heads_,
                                             latent,
                                             rope,
                                             softmax_scale_,
                                             rows.sequences,
                                             rows.row_begin,
                                             rows.context_length,
                                             rows.causal,
                                             rows.slot_table,
                                             rows.table_stride,
                                             rows.ancestor_bits,
                                             attended};
  KDT_RETURN_IF_ERROR(attention_ == nullptr ? backend_->VerifyAttention(keys) : attention_->Run(keys));
  const Tensor values = MakeTensor(values_.data(), dtype, n, heads_ * v);
  KDT_RETURN_IF_ERROR(backend_->AbsorbValue({attended, layer.kv_b, heads_, nope, v, latent, values}));
  return backend_->Gemm({values, layer.o, MakeTensor(branch_.data(), dtype, n, config_->hidden_size)});
}

// The sum behind the attention and its norm, then branch (this rank's slice of the inner widths). What reads
// the sum first, the router's scores and the shared experts' gate and up, goes with it; what is behind the
// scores goes with the experts.
absl::Status TargetForward::Mlp(const TargetLayerWeights& layer, const StepRows& rows,
                                const kernels::RmsNormArgs& norm, Collective& collective, PhaseTimes* times) {
  const int64_t n = rows.rows;
  const kernels::DType dtype = backend_->activation_dtype();
  const bool dense = layer.gate_up.rows > 0, routed = layer.experts.experts > 0;
  const Tensor branch = norm.x, normed = norm.out;
  if (!routed && !dense) return collective.AllReduceNorm(*backend_, norm);
  if (!routed) {
    PhaseTimer timer(&times->dense_ns, &collective);
    const Tensor gate_up = MakeTensor(gate_up_.data(), dtype, n, layer.gate_up.rows);
    KDT_RETURN_IF_ERROR(collective.AllReduceNormGemm(*backend_, norm, {normed, layer.gate_up, gate_up}));
    kernels::GemmArgs down = {gate_up, layer.down, branch};
    down.gated = true;
    return backend_->Gemm(down);
  }
  PhaseTimer timer(&times->moe_ns, &collective);
  const int64_t top_k = config_->num_experts_per_tok;
  kernels::GemmArgs scores = {normed, layer.router,
                              MakeTensor(scores_.data(), kernels::DType::kF32, n, layer.router.rows)};
  kernels::MoeArgs moe = {normed, layer.experts, nullptr, nullptr, top_k, branch};
  moe.choice = {scores.y,
                layer.router_bias,
                config_->norm_topk_prob,
                static_cast<float>(config_->routed_scaling_factor),
                rows.row_begin + rows.sequences,
                expert_ids_.as<int32_t>() + moe_layer_++ * n * top_k,
                expert_weights_.as<float>()};
  if (dense) {
    scores.beside_w = layer.gate_up;
    scores.beside_y = MakeTensor(gate_up_.data(), dtype, n, layer.gate_up.rows / 2);
    scores.beside_gated = true;
    moe.shared_inner = scores.beside_y, moe.shared_down = layer.down;
  }
  KDT_RETURN_IF_ERROR(collective.AllReduceNormGemm(*backend_, norm, scores));
  return backend_->Moe(moe);
}

absl::Status TargetForward::QueueExperts(int64_t rows) {
  if (expert_host_.data() == nullptr) return absl::OkStatus();
  return backend_->DownloadAsync(expert_host_.data(), expert_ids_.data(),
                                 moe_layers_ * rows * config_->num_experts_per_tok * sizeof(int32_t));
}

void TargetForward::CountExperts(int64_t rows) {
  const auto count = static_cast<size_t>(rows * config_->num_experts_per_tok);
  const auto* ids = expert_host_.data() != nullptr ? reinterpret_cast<const int32_t*>(expert_host_.data())
                                                   : expert_ids_.as<int32_t>();
  for (const TargetLayerWeights& layer : weights_->layers) {
    if (layer.experts.experts == 0) continue;
    expert_load_.Count(&layer, {ids, count});
    ids += count;
  }
}

absl::Status TargetForward::Logits(const int32_t* rows, int64_t count) {
  KDT_CHECK(count > 0 && count <= max_rows_);
  const kernels::DType dtype = backend_->activation_dtype();
  const int64_t hidden = config_->hidden_size;
  const Tensor gathered = MakeTensor(branch_.data(), dtype, count, hidden);
  KDT_RETURN_IF_ERROR(
      backend_->Embedding({rows, 0, MakeTensor(residual_.data(), dtype, max_rows_, hidden), gathered}));
  const Tensor normed = MakeTensor(normed_.data(), dtype, count, hidden);
  KDT_RETURN_IF_ERROR(backend_->RmsNorm(
      {gathered, {}, weights_->final_norm, static_cast<float>(config_->rms_norm_eps), normed}));
  return backend_->Gemm({normed, weights_->lm_head, logits(count)});
}

}  // namespace kdt
