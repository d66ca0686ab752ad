#include "worker/draft/drafter.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace kdt {

using kernels::Buffer;
using kernels::MakeTensor;
using kernels::Tensor;

absl::StatusOr<std::unique_ptr<Drafter>> Drafter::Create(kernels::Backend* backend,
                                                         const DrafterConfig* config,
                                                         const DrafterWeights* weights, TargetForward* target,
                                                         const KvStorage* kv, Shard shard, int64_t max_rows,
                                                         float rope_factor) {
  if (max_rows < config->block_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_rows is ", max_rows, ", but the drafter's block_size is ", config->block_size));
  }
  auto drafter = std::unique_ptr<Drafter>(new Drafter);
  drafter->backend_ = backend;
  drafter->config_ = config;
  drafter->weights_ = weights;
  drafter->target_ = target;
  drafter->kv_ = kv;
  drafter->shard_ = shard;
  drafter->heads_ = shard.Count(config->num_attention_heads);
  drafter->kv_heads_ = shard.Count(config->num_key_value_heads);
  drafter->max_rows_ = max_rows;
  drafter->rope_factor_ = rope_factor > 0 ? rope_factor : config->rope.AttentionFactor();
  drafter->eps_ = static_cast<float>(config->rms_norm_eps);

  for (const DrafterLayerWeights& layer : weights->layers) drafter->k_norms_.push_back(layer.k_norm);

  const int64_t size = kernels::DTypeSize(backend->activation_dtype());
  const int64_t f32 = sizeof(float);
  const int64_t inner = shard.Count(config->intermediate_size);
  const std::pair<Buffer*, int64_t> widths[] = {
      {&drafter->features_, config->hidden_size * f32},
      {&drafter->kept_features_, config->hidden_size * f32},
      {&drafter->residual_, config->hidden_size * size},
      {&drafter->branch_, config->hidden_size * size},
      {&drafter->normed_, config->hidden_size * size},
      {&drafter->q_, drafter->heads_ * config->head_dim * size},
      {&drafter->attended_, drafter->heads_ * config->head_dim * size},
      {&drafter->kv_rows_, weights->kv.rows * size},
      {&drafter->gate_up_, 2 * inner * size},
      {&drafter->act_, inner * size},
      {&drafter->logits_, target->weights().lm_head.rows * f32},
  };
  for (const auto& [buffer, row_bytes] : widths) {
    KDT_ASSIGN_OR_RETURN(*buffer, Buffer::Make(*backend, row_bytes * max_rows));
  }
  return drafter;
}

absl::Status Drafter::OnLayerOutput(int64_t layer, const Tensor& residual) {
  const auto& ids = config_->target_layer_ids;
  const auto found = std::find(ids.begin(), ids.end(), layer);
  if (found == ids.end()) return absl::OkStatus();
  const int64_t i = found - ids.begin();
  const int64_t hidden = config_->hidden_size;
  const Tensor x = residual.Columns(shard_.Begin(hidden), shard_.Count(hidden));
  const Tensor sum = MakeTensor(features_.data(), kernels::DType::kF32, residual.rows, hidden);
  return backend_->Gemm({x, weights_->fc[i], sum, i > 0});
}

absl::Status Drafter::AppendContext(const ContextRows& context, Collective& collective) {
  const int64_t hidden = config_->hidden_size;
  const Tensor features = MakeTensor(kept_features_.data(), kernels::DType::kF32, context.count, hidden);
  KDT_RETURN_IF_ERROR(backend_->Embedding(
      {context.rows, 0, MakeTensor(features_.data(), kernels::DType::kF32, max_rows_, hidden), features}));
  const Tensor normed = Act(normed_, context.count, hidden);
  KDT_RETURN_IF_ERROR(
      collective.AllReduceNorm(*backend_, {features, {}, weights_->hidden_norm, eps_, normed}));
  const auto layers = static_cast<int64_t>(weights_->layers.size());
  const Tensor kv = Act(kv_rows_, context.count, weights_->kv.rows);
  KDT_RETURN_IF_ERROR(backend_->Gemm({normed, weights_->kv, kv}));
  return backend_->DraftPrepare({{},
                                 kv,
                                 heads_,
                                 kv_heads_,
                                 config_->head_dim,
                                 layers,
                                 nullptr,
                                 k_norms_.data(),
                                 eps_,
                                 context.positions,
                                 weights_->rope_inv_freq,
                                 rope_factor_,
                                 context.slots,
                                 kv_->Layer(0),
                                 kv_->layer_stride()});
}

// normed -> queries, keys and values of the block (this rank's heads).
kernels::GemmArgs Drafter::Projections(int64_t l, int64_t rows) const {
  const int64_t width = 2 * kv_heads_ * config_->head_dim;
  kernels::GemmArgs gemm = {Act(normed_, rows, config_->hidden_size), weights_->layers[l].q,
                            Act(q_, rows, heads_ * config_->head_dim)};
  gemm.beside_w = weights_->kv.Rows(l * width, width);
  gemm.beside_y = Act(kv_rows_, rows, width);
  return gemm;
}

// Projections -> branch (this rank's heads).
absl::Status Drafter::Attention(int64_t l, const DraftBlocks& blocks) {
  const DrafterLayerWeights& layer = weights_->layers[l];
  const int64_t rows = blocks.sequences * config_->block_size;
  const int64_t dim = config_->head_dim;
  const Tensor q = Act(q_, rows, heads_ * dim);
  const int64_t width = kv_heads_ * dim;
  const Tensor kv = Act(kv_rows_, rows, 2 * width);
  KDT_RETURN_IF_ERROR(
      backend_->DraftPrepare({q, kv, heads_, kv_heads_, dim, 1, layer.q_norm, &k_norms_[l], eps_,
                              blocks.positions, weights_->rope_inv_freq, rope_factor_}));
  const Tensor attended = Act(attended_, rows, heads_ * dim);
  KDT_RETURN_IF_ERROR(backend_->DraftAttention(
      {q, kv.Columns(0, width), kv.Columns(width, width), kv_->Layer(l), heads_, kv_heads_, dim,
       config_->block_size, config_->SoftmaxScale(), blocks.sequences, blocks.context_length,
       blocks.window_begin, blocks.slot_table, blocks.table_stride, attended}));
  return backend_->Gemm({attended, layer.o, Act(branch_, rows, config_->hidden_size)});
}

absl::StatusOr<Tensor> Drafter::Draft(const DraftBlocks& blocks, Collective& collective) {
  KDT_CHECK(blocks.sequences > 0 && blocks.sequences <= max_sequences());
  const int64_t rows = blocks.sequences * config_->block_size;
  const int64_t hidden = config_->hidden_size;
  const Tensor residual = Act(residual_, rows, hidden);
  const Tensor branch = Act(branch_, rows, hidden);
  const Tensor normed = Act(normed_, rows, hidden);
  KDT_RETURN_IF_ERROR(target_->Embed(blocks.tokens, residual, collective));
  const size_t layers = weights_->layers.size();
  KDT_RETURN_IF_ERROR(backend_->RmsNorm({residual, {}, weights_->layers[0].input_norm, eps_, normed}));
  KDT_RETURN_IF_ERROR(backend_->Gemm(Projections(0, rows)));
  for (size_t l = 0; l < layers; ++l) {
    const DrafterLayerWeights& layer = weights_->layers[l];
    KDT_RETURN_IF_ERROR(Attention(l, blocks));
    const Tensor act = Act(act_, rows, layer.down.cols);
    const Tensor gate_up = Act(gate_up_, rows, 2 * layer.down.cols);
    KDT_RETURN_IF_ERROR(collective.AllReduceNormGemm(
        *backend_, {branch, residual, layer.post_norm, eps_, normed}, {normed, layer.gate_up, gate_up}));
    KDT_RETURN_IF_ERROR(backend_->SiluMul({gate_up, act}));
    KDT_RETURN_IF_ERROR(backend_->Gemm({act, layer.down, branch}));
    if (l + 1 < layers) {
      KDT_RETURN_IF_ERROR(collective.AllReduceNormGemm(
          *backend_, {branch, residual, weights_->layers[l + 1].input_norm, eps_, normed},
          Projections(static_cast<int64_t>(l) + 1, rows)));
    } else {
      KDT_RETURN_IF_ERROR(collective.AllReduceSum(branch));
      KDT_RETURN_IF_ERROR(backend_->Add({branch, residual}));
    }
  }
  // The root's row has done its work.
  const int64_t masks = blocks.sequences * (config_->block_size - 1);
  const Tensor gathered = Act(branch_, masks, hidden);
  KDT_RETURN_IF_ERROR(backend_->Embedding({blocks.mask_rows, 0, residual, gathered}));
  const Tensor last = Act(normed_, masks, hidden);
  KDT_RETURN_IF_ERROR(backend_->RmsNorm({gathered, {}, weights_->final_norm, eps_, last}));
  const Tensor& lm_head = target_->weights().lm_head;
  const Tensor logits = MakeTensor(logits_.data(), kernels::DType::kF32, masks, lm_head.rows);
  KDT_RETURN_IF_ERROR(backend_->Gemm({last, lm_head, logits}));
  return logits;
}

}  // namespace kdt
