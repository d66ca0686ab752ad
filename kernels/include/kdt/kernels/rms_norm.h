// out = x * rsqrt(mean(x^2) + eps) * weight, per row, in float32 inside; with `residual` first residual += x
// and the norm is taken of the sum (Zhang and Sennrich 2019; the order of roundings follows transformers'
// DeepseekV3RMSNorm).
#pragma once

#include "kdt/kernels/tensor.h"

namespace kdt::kernels {

struct RmsNormArgs {
  Tensor x;                // [rows, n]
  Tensor residual;         // [rows, n], updated in place; data == nullptr: none
  const uint16_t* weight;  // bf16 [n]
  float eps;
  Tensor out;  // [rows, n]; may be x. Its dtype may differ from x's (the drafter's f32 features)
};

// residual += x, nothing else (behind the last layer, or where no norm follows).
struct AddArgs {
  Tensor x;         // [rows, n]
  Tensor residual;  // [rows, n]
};

}  // namespace kdt::kernels
