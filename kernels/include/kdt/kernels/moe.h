// Routed experts of one rank, INT4 weights with one bf16 scale a group of 32 inputs (compressed-tensors
// "pack-quantized", common/int4.h), never expanded in memory:
//   out[r] (+)= sum over r's experts e held here of weight[r, e] * W_down[e] (silu(W_gate[e] x_r) * (W_up[e]
//   x_r))
// The sum over experts runs by rising expert index whatever other rows do. With tensor sharding each rank
// holds a slice of every expert's inner width and the sum over ranks completes the product; with expert
// sharding it holds whole experts.
#pragma once

#include "kdt/kernels/tensor.h"

namespace kdt::kernels {

inline constexpr int64_t kInt4Group = 32;  // inputs a scale

// All experts of a layer behind each other, as a checkpoint has them; what Moe gets has been through the
// backend's PrepareExperts, which may have put each array into another order (kernels/cuda/moe/int4.cuh).
// Packed: eight inputs an int32, input i in bits 4i..4i+3, stored as q + 8.
struct Int4Experts {
  int64_t experts = 0;                      // experts held here
  int64_t first_expert = 0;                 // global index of the first
  int64_t hidden = 0;                       // multiple of 32
  int64_t inner = 0;                        // this rank's slice of the expert width, multiple of 32
  const uint32_t* gate_up = nullptr;        // [experts, 2 * inner, hidden / 8]: gate rows, then up rows
  const uint16_t* gate_up_scale = nullptr;  // bf16 [experts, 2 * inner, hidden / 32]
  const uint32_t* down = nullptr;           // [experts, hidden, inner / 8]
  const uint16_t* down_scale = nullptr;     // bf16 [experts, hidden, inner / 32]
};

// The choice of the experts from the router's scores, as Router makes it (kdt/kernels/router.h), as the first
// part of Moe.
struct MoeChoice {
  Tensor scores;  // f32 [rows, experts of all ranks]: x W^T, before the sigmoid. No rows: no choice
  const float* bias = nullptr;  // [experts]
  bool normalize = false;
  float scale = 1.0f;
  const int32_t* row_count = nullptr;  // as in RouterArgs
  int32_t* expert_ids = nullptr;       // [rows, top_k]: what was chosen, for whoever wants to know
  float* weights = nullptr;            // [rows, top_k]
};

struct MoeArgs {
  Tensor x;  // [rows, hidden]
  Int4Experts weights;
  const int32_t* expert_ids;    // [rows, top_k], rising in each row; an id not held here is skipped. Not read
                                // with a choice
  const float* expert_weights;  // [rows, top_k], likewise
  int64_t top_k;
  Tensor out;               // [rows, hidden]
  bool accumulate = false;  // add to out (the shared expert's result) instead of overwriting
  MoeChoice choice = {};
  // The shared experts' last part: shared_inner shared_down^T, as Gemm makes it in out, is what the experts
  // are added to. Not with accumulate. No rows of shared_down: none.
  Tensor shared_inner = {};  // activation dtype [rows, shared width]: silu(gate) * up
  Tensor shared_down = {};   // bf16 [hidden, shared width]
};

}  // namespace kdt::kernels
