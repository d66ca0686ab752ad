// Attention of tree rows over a latent KV pool (MLA, absorbed form: one KV head of width latent + rope; the
// value is the first `latent` columns of the key).
//
// Row r of sequence s, at row index i = r - row_begin[s] within the sequence, sees
//   - all committed positions p < context_length[s], through slot_table[s, p], and
//   - of its own rows the ones its mask allows: row j lies in slot slot_table[s, context_length[s] + j];
//     causal[s]: j <= i (a chain: prefill chunk);  else bit j of ancestor_bits[r] (itself included).
//   out[r, h] = sum_k softmax_k(scale * q[r, h] . key_k) key_k[0:latent]
// A row's keys are summed in position order (prefix, then its own rows by rising j), in blocks counted over
// the keys it sees, so on the CPU a tree row gives the bits that plain decoding at its position gives. Rows
// outside every sequence's range are padding: they are left as they are. A sequence may have no rows
// (row_begin does not rise): a captured step names as many sequences as it may ever have. On CUDA, row_begin,
// context_length, the slot table and committed rows are read before the kernels in front have finished: write
// them in front of the queue's last Embedding, in an earlier graph, or in work the host has waited for;
// UploadAsync right in front is not enough. q and the sequences' own rows may come from the kernels in front.
//
// Backend::VerifyAttentionReference takes the same arguments and gives the same result by the plainest means,
// in float32 and slowly: what validate mode compares with. On CUDA: latent up to 1024, rope up to 128, both
// even, bf16. On the CPU it is the ordinary op, which is exact enough to be its own reference.
#pragma once

#include "kdt/kernels/tensor.h"

namespace kdt::kernels {

inline constexpr int kMaxTreeRows = 256;                  // rows a tree, root included
inline constexpr int kAncestorWords = kMaxTreeRows / 64;  // uint64 words a row of ancestor bits

struct VerifyAttentionArgs {
  Tensor q;     // [rows, heads * (latent + rope)]
  Tensor pool;  // one layer: f32 or bf16 [slots, latent + rope]
  int64_t heads, latent, rope;
  float scale;
  int64_t sequences;
  const int32_t* row_begin;       // [sequences + 1]: sequence s has rows row_begin[s] .. row_begin[s + 1]
  const int32_t* context_length;  // [sequences]: committed tokens, own rows not counted
  const uint8_t* causal;          // [sequences]
  const int32_t* slot_table;      // [sequences, table_stride]
  int64_t table_stride;
  const uint64_t* ancestor_bits;  // [rows, kAncestorWords]; not read for causal sequences
  Tensor out;                     // [rows, heads * latent]
  // For captured launches, whose sequences are not known yet. CUDA only; the CPU looks at the sequences
  // themselves.
  int64_t max_sequence_rows =
      0;  // the most rows a sequence will have; 0: any number. A promise: longer ones are not attended
  // 0: the keys of a sequence are cut so that all sequences of the launch fill the chip together, which
  // depends on the others' lengths. > 0: cut after every split_keys keys (more where a table is longer than
  // 512 of them), so that a sequence's bits depend on nothing but itself; costs what
  // docs/kernels/verify_attention.md says.
  int64_t split_keys = 0;
};

}  // namespace kdt::kernels
