// What stands between the drafter's projections and their users, as one op:
//   q     each head's vector: rms_norm (rms_norm.h), then rope in half-split pairs (rope.h), in place
//   kv    of each of `layers` layers [keys | values]: keys as q, values as they are
// Without slots keys are changed in place. With slots a row's keys and values go to its slot of each layer's
// pool, rounded to the pool's dtype; a row with slot < 0 is padding and writes nothing.
#pragma once

#include "kdt/kernels/tensor.h"

namespace kdt::kernels {

struct DraftPrepareArgs {
  Tensor q;   // [rows, heads * dim]; data == nullptr: no queries
  Tensor kv;  // [rows, layers * 2 * kv_heads * dim]; with slots undefined afterwards
  int64_t heads, kv_heads, dim, layers;
  const uint16_t* q_norm;          // bf16 [dim]; not read without queries
  const uint16_t* const* k_norms;  // [layers] in host memory, each bf16 [dim]
  float eps;
  const int32_t* positions;  // [rows]
  const float* inv_freq;     // [dim / 2]
  float attention_factor;
  const int32_t* slots = nullptr;  // [rows]; no slot >= 0 twice
  Tensor pool = {};                // the first layer's: f32 or bf16 [slots, 2 * kv_heads * dim]
  int64_t pool_layer_stride = 0;   // elements from one layer's pool to the next one's
};

}  // namespace kdt::kernels
