// From the first projection of latent attention to what attention takes, as one op: MlaPrepare, then
//   absorb.q = q latent w_q_b^T   (Gemm)
// then AbsorbQuery. A backend may do it in one kernel: where it does, the normed q latent and q need not be
// stored (prepare.qkv and absorb.q are undefined afterwards), and sums may be taken in another order than by
// the three ops. A row's result depends on its own inputs only. On CUDA the positions are read before the
// kernels in front have finished, as verify_attention.h says of lengths.
#pragma once

#include "kdt/kernels/mla_absorb.h"
#include "kdt/kernels/mla_prepare.h"
#include "kdt/kernels/tensor.h"

namespace kdt::kernels {

struct MlaQueryArgs {
  MlaPrepareArgs prepare;
  Tensor w_q_b;            // bf16 [heads * (nope + rope), q_lora]
  AbsorbQueryArgs absorb;  // with positions
};

}  // namespace kdt::kernels
