// Writes each row's K/V vector into its slot of one layer's pool, rounding to the pool's dtype.
// A row with slot < 0 is padding and writes nothing.
#pragma once

#include "kdt/kernels/tensor.h"

namespace kdt::kernels {

struct KvWriteArgs {
  Tensor x;              // [rows, width]: for MLA the normed latent (512) and the rotated key part (64)
  const int32_t* slots;  // [rows]
  Tensor pool;           // f32 or bf16 [slots, width]
};

}  // namespace kdt::kernels
