// The two absorbed projections of multi-head latent attention (DeepSeek-V2, section 2.1): with kv_b_proj
// split a head into W_uk [nope, latent] and W_uv [v, latent],
//   query:  q_out[r, h, 0:latent] = q[r, h, 0:nope] W_uk[h];  q_out[r, h, latent:latent+rope] = q[r, h,
//   nope:nope+rope] value:  out[r, h, 0:v] = W_uv[h] attended[r, h, 0:latent]
// With positions, the query op also rotates the rope part, to the bits that Rope (interleaved pairs) before
// it would give.
#pragma once

#include "kdt/kernels/tensor.h"

namespace kdt::kernels {

struct AbsorbQueryArgs {
  Tensor q;  // [rows, heads * (nope + rope)], rope part already rotated unless positions are given
  const uint16_t* w_kv_b;  // bf16 [heads, nope + v, latent]: kv_b_proj rows of this rank's heads as stored
  int64_t heads, nope, rope, v, latent;
  Tensor out;                          // [rows, heads * (latent + rope)]
  const int32_t* positions = nullptr;  // [rows], or nullptr: copy the rope part as it is
  const float* inv_freq = nullptr;     // [rope / 2]
  float attention_factor = 1.0f;       // multiplies cos and sin
};

struct AbsorbValueArgs {
  Tensor attended;         // [rows, heads * latent]
  const uint16_t* w_kv_b;  // as above
  int64_t heads, nope, v, latent;
  Tensor out;  // [rows, heads * v]
};

}  // namespace kdt::kernels
