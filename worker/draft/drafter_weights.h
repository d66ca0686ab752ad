// One rank's weights of the DFlash drafter. Cut among the ranks: attention heads (query heads follow their KV
// head), the MLP's inner width, and the input side of fc.
//
// fc maps the concatenated target layer outputs to the drafter's width. It is kept as one matrix a target
// layer, so that its sum grows while the target's layers run and no concatenation is stored. Each rank holds
// a range of every part's input columns and the sum over ranks is taken once, over the committed rows:
// replicated, fc would be a tenth of all bytes a rank of the real model reads a step.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/drafter_config.h"
#include "kdt/kernels/backend.h"
#include "worker/model/weight_loader.h"

namespace kdt {

struct DrafterLayerWeights {
  const uint16_t* input_norm = nullptr;  // bf16 [hidden]
  kernels::Tensor q;                     // [heads_local * head_dim, hidden]
  const uint16_t* q_norm = nullptr;      // [head_dim]
  const uint16_t* k_norm = nullptr;      // [head_dim]
  kernels::Tensor o;                     // [hidden, heads_local * head_dim]
  const uint16_t* post_norm = nullptr;   // [hidden]
  kernels::Tensor gate_up;               // [2 * inner_local, hidden]
  kernels::Tensor down;                  // [hidden, inner_local]
};

struct DrafterWeights {
  // k_proj and v_proj of all layers: of each layer [2 * kv_heads_local * head_dim, hidden], keys above
  // values. The context's features are the same for all layers, so one product gives all their keys and
  // values.
  kernels::Tensor kv;
  std::vector<kernels::Tensor> fc;        // a target layer each: [hidden, hidden / ranks]
  const uint16_t* hidden_norm = nullptr;  // [hidden]
  const uint16_t* final_norm = nullptr;   // [hidden]
  const float* rope_inv_freq = nullptr;   // [head_dim / 2]
  std::vector<DrafterLayerWeights> layers;
  std::vector<kernels::Buffer> buffers;  // what the pointers above point into
};

// Notes (or, with a planning loader, checks) everything. Errors name the tensor. A checkpoint that holds
// other tensors than these is another kind of drafter and refused.
absl::StatusOr<DrafterWeights> LoadDrafterWeights(const DrafterConfig& config, const WeightSource& source,
                                                  WeightLoader& loader);

}  // namespace kdt
