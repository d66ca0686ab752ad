// The DFlash drafter on one rank. In a step it
//   1. gathers context features while the target's layers run (OnLayerOutput),
//   2. appends K/V of the committed rows to its pool, whose slots are the target's (AppendContext),
//   3. runs one pass over a block a sequence, [root, mask, mask, ...], and returns logits for the masks
//   (Draft).
// Feature of a position: hidden_norm(fc(concat of target layer outputs)). Attention inside the block is not
// causal.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/drafter_config.h"
#include "kdt/kernels/backend.h"
#include "worker/collective/collective.h"
#include "worker/draft/drafter_weights.h"
#include "worker/engine/kv_storage.h"
#include "worker/engine/target_forward.h"

namespace kdt {

// Rows whose K/V join the context, all pointers in the backend's memory.
struct ContextRows {
  int64_t count = 0;
  const int32_t* rows = nullptr;       // [count] rows of the step
  const int32_t* positions = nullptr;  // [count]
  const int32_t* slots = nullptr;      // [count], -1: padding
};

// Blocks of `block_size` rows, one a sequence, all pointers in the backend's memory.
struct DraftBlocks {
  int64_t sequences = 0;
  const int32_t* tokens = nullptr;          // [sequences * block_size]: root, mask, mask, ...
  const int32_t* positions = nullptr;       // [sequences * block_size]
  const int32_t* context_length = nullptr;  // [sequences]: committed positions
  const int32_t* window_begin = nullptr;    // [sequences]: first context position that is seen
  const int32_t* slot_table = nullptr;      // [sequences, table_stride]
  int64_t table_stride = 0;
  const int32_t* mask_rows = nullptr;  // [sequences * (block_size - 1)]: rows that are not roots
};

class Drafter {
 public:
  // Everything passed by pointer outlives the object. At most `max_rows` rows a step and block rows a pass.
  // `rope_factor`: factor on cos and sin (0: the config's).
  static absl::StatusOr<std::unique_ptr<Drafter>> Create(kernels::Backend* backend,
                                                         const DrafterConfig* config,
                                                         const DrafterWeights* weights, TargetForward* target,
                                                         const KvStorage* kv, Shard shard, int64_t max_rows,
                                                         float rope_factor);

  // Elements of a slot in a layer's pool: K of this rank's heads, then V.
  static int64_t KvWidth(const DrafterConfig& config, Shard shard) {
    return 2 * shard.Count(config.num_key_value_heads) * config.head_dim;
  }

  absl::Status OnLayerOutput(int64_t layer, const kernels::Tensor& residual);
  absl::Status AppendContext(const ContextRows& context, Collective& collective);
  // f32 [sequences * (block_size - 1), vocab_local], valid until the next call.
  absl::StatusOr<kernels::Tensor> Draft(const DraftBlocks& blocks, Collective& collective);

  const DrafterConfig& config() const { return *config_; }
  int64_t max_sequences() const { return max_rows_ / config_->block_size; }  // a pass

 private:
  Drafter() = default;
  kernels::GemmArgs Projections(int64_t layer, int64_t rows) const;
  absl::Status Attention(int64_t layer, const DraftBlocks& blocks);
  kernels::Tensor Act(const kernels::Buffer& buffer, int64_t rows, int64_t cols) const {
    return kernels::MakeTensor(buffer.data(), backend_->activation_dtype(), rows, cols);
  }

  kernels::Backend* backend_ = nullptr;
  const DrafterConfig* config_ = nullptr;
  const DrafterWeights* weights_ = nullptr;
  TargetForward* target_ = nullptr;
  const KvStorage* kv_ = nullptr;
  Shard shard_;
  int64_t heads_ = 0;     // of this rank
  int64_t kv_heads_ = 0;  // of this rank
  int64_t max_rows_ = 0;
  float rope_factor_ = 1;
  float eps_ = 0;
  std::vector<const uint16_t*> k_norms_;  // of the layers

  // [max_rows, ...] each; none is shared with the target.
  kernels::Buffer features_;       // f32 hidden: fc's sum over target layers, of this rank's columns
  kernels::Buffer kept_features_;  // f32 hidden: of the rows that are kept
  kernels::Buffer residual_, branch_, normed_;  // hidden
  kernels::Buffer q_, attended_;                // heads * dim
  kernels::Buffer kv_rows_;                     // layers * 2 * kv_heads * dim
  kernels::Buffer gate_up_, act_;               // 2 * inner, inner
  kernels::Buffer logits_;                      // f32 vocab_local
};

}  // namespace kdt
