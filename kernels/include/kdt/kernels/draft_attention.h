// Attention of the DFlash drafter: grouped-query, not causal inside the block, over all context rows and the
// block. Sequence s has `block` consecutive query rows (s * block ..). Its keys are the context positions
// window_begin[s] .. context_length[s] - 1 through slot_table, whose K and V lie in the pool, then the
// block's own K/V rows.
//   out[r, h] = sum_k softmax_k(scale * q[r, h] . K_k[h / (heads / kv_heads)]) V_k[...]
// On CUDA window_begin, context_length, the slot table and the context's rows of the pool are read before the
// kernels in front have finished, as verify_attention.h says. Keys are summed in position order on the CPU.
// CUDA takes head dimensions 32, 64 and 128, and splits the keys by the length.
#pragma once

#include "kdt/kernels/tensor.h"

namespace kdt::kernels {

struct DraftAttentionArgs {
  Tensor q;        // [sequences * block, heads * dim], normed and rotated
  Tensor block_k;  // [sequences * block, kv_heads * dim], normed and rotated
  Tensor block_v;  // [sequences * block, kv_heads * dim]
  Tensor pool;     // one layer: [slots, 2 * kv_heads * dim]: K of all heads, then V of all heads
  int64_t heads, kv_heads, dim, block;
  float scale;
  int64_t sequences;
  const int32_t* context_length;  // [sequences]
  const int32_t* window_begin;    // [sequences], 0: all of the context
  const int32_t* slot_table;      // [sequences, table_stride]
  int64_t table_stride;
  Tensor out;  // [sequences * block, heads * dim]
};

}  // namespace kdt::kernels
