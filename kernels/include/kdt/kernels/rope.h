// Rotary position embedding, in place, for `heads` vectors a row. Frequencies come from the checkpoint's rope
// settings (common/model_config.h): angle = position * inv_freq[i]; cos and sin are multiplied by
// attention_factor.
//   kInterleaved (MLA):   pairs (2i, 2i+1) of the rotated part, result stored at the same places.
//   kHalfSplit (drafter): pairs (i, i + dim/2).
// Note on MLA: transformers de-interleaves to halves; a dot product of q and k does not depend on that order.
#pragma once

#include "kdt/kernels/tensor.h"

namespace kdt::kernels {

enum class RopeLayout : uint8_t { kInterleaved, kHalfSplit };

struct RopeArgs {
  Tensor x;  // [rows, >= heads * head_stride]
  int64_t heads;
  int64_t head_stride;       // elements from one head's vector to the next
  int64_t offset;            // first rotated element within a head
  int64_t dim;               // rotated elements, even
  const int32_t* positions;  // [rows]
  const float* inv_freq;     // [dim / 2]
  float attention_factor;    // multiplies cos and sin
  RopeLayout layout;
};

}  // namespace kdt::kernels
