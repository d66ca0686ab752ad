// The target's forward over the rows of a step: embedding, MLA and MLP layers, logits of chosen rows
// (docs/architecture.md says what a step is; the op headers hold the formulas). Written against
// kernels::Backend alone: every address is fixed at Create, only row counts vary, so that a backend may
// capture it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/model_config.h"
#include "kdt/kernels/backend.h"
#include "worker/collective/collective.h"
#include "worker/engine/attention_check.h"
#include "worker/engine/expert_load.h"
#include "worker/engine/kv_storage.h"
#include "worker/engine/phase_timer.h"
#include "worker/model/target_weights.h"

namespace kdt {

// The rows of one step; all pointers are the backend's memory. Sequence s has rows row_begin[s] ..
// row_begin[s + 1]. Rows behind the last sequence's are padding: token 0, slot -1.
struct StepRows {
  int64_t rows = 0;
  int64_t sequences = 0;
  const int32_t* tokens = nullptr;          // [rows]
  const int32_t* positions = nullptr;       // [rows]
  const int32_t* slots = nullptr;           // [rows]: where the row's K/V goes
  const int32_t* row_begin = nullptr;       // [sequences + 1]
  const int32_t* context_length = nullptr;  // [sequences]: committed tokens before the step
  const uint8_t* causal = nullptr;          // [sequences]: 1 for a prefill chunk
  const int32_t* slot_table = nullptr;      // [sequences, table_stride]
  int64_t table_stride = 0;
  const uint64_t* ancestor_bits = nullptr;  // [rows, kernels::kAncestorWords]
};

class TargetForward {
 public:
  // Called with the residual stream [rows, hidden] behind each layer (-1: the embedding).
  using LayerHook = std::function<absl::Status(int64_t layer, const kernels::Tensor& residual)>;

  // Everything passed by pointer outlives the object. At most `max_rows` rows a step. Without `attention` the
  // fast kernel runs.
  static absl::StatusOr<std::unique_ptr<TargetForward>> Create(
      kernels::Backend* backend, const ModelConfig* config, const TargetWeights* weights, const KvStorage* kv,
      Shard shard, int64_t max_rows, AttentionCheck* attention = nullptr,
      MoeSharding sharding = MoeSharding::kTensor);

  // Writes the rows' K/V and leaves their final residual stream behind.
  absl::Status Run(const StepRows& rows, Collective& collective, const LayerHook& hook, PhaseTimes* times);

  // Logits of `count` of the rows just run, into logits(count). `rows` lie in the backend's memory.
  absl::Status Logits(const int32_t* rows, int64_t count);
  // f32 [count, vocab_local].
  kernels::Tensor logits(int64_t count) const {
    return kernels::MakeTensor(logits_.data(), kernels::DType::kF32, count, weights_->lm_head.rows);
  }

  // Embeds ids (summed over ranks) into `out` [rows, hidden]; the drafter shares it.
  absl::Status Embed(const int32_t* tokens, const kernels::Tensor& out, Collective& collective);

  const TargetWeights& weights() const { return *weights_; }

  // Behind Run: what the routers chose is on its way to the host.
  absl::Status QueueExperts(int64_t rows);
  // Takes the experts that the last Run of `rows` rows chose into the load; everything queued has finished.
  void CountExperts(int64_t rows);
  // What the router did so far.
  const ExpertLoad& expert_load() const { return expert_load_; }

 private:
  TargetForward() = default;
  absl::Status Attention(int64_t layer, const StepRows& rows, PhaseTimes* times);
  absl::Status Mlp(const TargetLayerWeights& layer, const StepRows& rows, const kernels::RmsNormArgs& norm,
                   Collective& collective, PhaseTimes* times);

  kernels::Backend* backend_ = nullptr;
  const ModelConfig* config_ = nullptr;
  const TargetWeights* weights_ = nullptr;
  const KvStorage* kv_ = nullptr;
  AttentionCheck* attention_ = nullptr;
  int64_t heads_ = 0;  // of this rank
  int64_t max_rows_ = 0;
  float softmax_scale_ = 0;
  float rope_factor_ = 0;

  // Activations, [max_rows, ...] each.
  kernels::Buffer residual_, branch_, normed_;  // hidden
  kernels::Buffer qkv_a_;                       // q_lora + kv_lora + rope
  kernels::Buffer q_;                           // heads * (nope + rope)
  kernels::Buffer absorbed_;                    // heads * (kv_lora + rope)
  kernels::Buffer attended_;                    // heads * kv_lora
  kernels::Buffer values_;                      // heads * v
  kernels::Buffer gate_up_;                     // 2 * widest inner
  kernels::Buffer expert_ids_;                  // [MoE layers, rows, top_k] of the last run
  kernels::Buffer scores_;                      // f32, of the routers' experts
  kernels::Buffer expert_weights_;
  kernels::Buffer logits_;  // f32 vocab_local
  int64_t moe_layers_ = 0;
  int64_t moe_layer_ = 0;            // of these, the one that Run is at
  kernels::HostBuffer expert_host_;  // the ids where the device has memory of its own
  ExpertLoad expert_load_;
};

}  // namespace kdt
