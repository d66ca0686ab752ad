// y = x W^T (or y += x W^T with accumulate). Each output is one dot product whose order of summation does not
// depend on the number of rows, so a row gives the same bits alone and in a batch.
#pragma once

#include "kdt/kernels/tensor.h"

namespace kdt::kernels {

struct GemmArgs {
  Tensor x;  // activation dtype [rows, in]
  Tensor w;  // bf16 [out, in], as stored in checkpoints
  Tensor y;  // activation dtype or f32 [rows, out]
  bool accumulate = false;
  // x is [rows, 2 in], gate and up side by side, and silu(gate) * up takes its place: the bits of SiluMul
  // before it.
  bool gated = false;
  // A second matrix with the same inputs, for a second output: beside_y = x beside_w^T (never accumulated);
  // no rows: none. With beside_gated it is gate and up, half of its rows each, and beside_y [rows, half as
  // many] = silu(gate) * up, as SiluMul behind a gemm. Not with `gated`. On the CPU these are the bits of the
  // ops one by one; on CUDA the order of the sums follows from both matrices together.
  Tensor beside_w, beside_y;
  bool beside_gated = false;
};

// out = silu(gate) * up, where x holds gate in columns [0, n) and up in [n, 2n).
struct SiluMulArgs {
  Tensor x;    // [rows, 2n]
  Tensor out;  // [rows, n]
};

}  // namespace kdt::kernels
