// What stands between the first projection of latent attention and its users (DeepSeek-V2, section 2.1), as
// one op: with a row's [q latent | kv latent | k rope part] as q_a_proj and kv_a_proj_with_mqa give it,
//   q latent   rms_norm (rms_norm.h) in place
//   pool[slot] = [rms_norm(kv latent) | rope(k rope part)], interleaved pairs (rope.h), rounded to the pool's
//   dtype
// The same bits as these ops one after the other. A row with slot < 0 is padding and writes nothing to the
// pool.
#pragma once

#include "kdt/kernels/tensor.h"

namespace kdt::kernels {

struct MlaPrepareArgs {
  Tensor qkv;  // [rows, q_lora + latent + rope]; columns behind q_lora are undefined afterwards
  int64_t q_lora, latent, rope;
  const uint16_t* q_norm;   // bf16 [q_lora]
  const uint16_t* kv_norm;  // bf16 [latent]
  float eps;
  const int32_t* positions;  // [rows]
  const float* inv_freq;     // [rope / 2]
  float attention_factor;
  const int32_t* slots;  // [rows]; no slot >= 0 twice
  Tensor pool;           // f32 or bf16 [slots, latent + rope]
};

}  // namespace kdt::kernels
