// out[r] = table[token_ids[r] - vocab_begin], or zeros when the id is outside this rank's part of the
// vocabulary (the sum over ranks is then the embedding). With a table of activations it gathers rows by
// index.
#pragma once

#include "kdt/kernels/tensor.h"

namespace kdt::kernels {

struct EmbeddingArgs {
  const int32_t* token_ids;  // [rows], 0 <= id < vocab_size (checked by the caller)
  int64_t vocab_begin;       // first id of this rank
  Tensor table;              // bf16 or f32 [vocab_local, hidden]
  Tensor out;                // activation dtype or f32 [rows, hidden]
};

}  // namespace kdt::kernels
