// One rank's weights of the target model, in the shapes the forward works with.
//
// Cut among the ranks: attention heads (q_b, kv_b, o), inner widths (dense MLP, shared experts, routed
// experts unless those are whole on their ranks) and the vocabulary (embedding, lm_head). On every rank: q_a
// and kv_a, norms, router. Products
// whose inputs are cut (o, down) are partial sums; the sum over ranks completes them.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/model_config.h"
#include "kdt/kernels/backend.h"
#include "worker/model/weight_loader.h"

namespace kdt {

struct TargetLayerWeights {
  const uint16_t* input_norm = nullptr;  // bf16 [hidden]
  kernels::Tensor qkv_a;               // [q_lora + kv_lora + rope, hidden]: q_a_proj, then kv_a_proj_with_mqa
  const uint16_t* q_a_norm = nullptr;  // [q_lora]
  const uint16_t* kv_a_norm = nullptr;  // [kv_lora]
  kernels::Tensor q_b;                  // [heads_local * (nope + rope), q_lora]
  const uint16_t* kv_b = nullptr;       // [heads_local, nope + v, kv_lora]
  kernels::Tensor o;                    // [hidden, heads_local * v]
  const uint16_t* post_norm = nullptr;  // [hidden]

  // The dense MLP, or a MoE layer's shared experts; gate_up.rows == 0: a MoE layer without shared experts.
  kernels::Tensor gate_up;  // [2 * inner_local, hidden]: gate rows, then up rows
  kernels::Tensor down;     // [hidden, inner_local]

  // MoE layers only.
  kernels::Tensor router;              // [experts, hidden]
  const float* router_bias = nullptr;  // [experts]
  kernels::Int4Experts experts;        // experts == 0: a dense layer
};

struct TargetWeights {
  kernels::Tensor embedding;  // [vocab_local, hidden]
  kernels::Tensor lm_head;    // [vocab_local, hidden]
  int64_t vocab_begin = 0;    // first token id of this rank
  const uint16_t* final_norm = nullptr;
  const float* rope_inv_freq = nullptr;  // [rope / 2]
  std::vector<TargetLayerWeights> layers;
  std::vector<kernels::Buffer> buffers;  // what the pointers above point into
};

// Notes (or, with a planning loader, checks) everything; the loader's Finish copies it. Errors name the
// tensor.
absl::StatusOr<TargetWeights> LoadTargetWeights(const ModelConfig& config, MoeSharding sharding,
                                                WeightLoader& loader);

}  // namespace kdt
