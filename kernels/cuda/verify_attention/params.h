// What the two kernels of verify_attention are launched with. kdt/kernels/verify_attention.h gives the
// meaning.
#pragma once

#include <cstdint>

namespace kdt::cuda {

inline constexpr int kLatent = 512;
inline constexpr int kRope = 64;
inline constexpr int kKeyWidth = kLatent + kRope;
inline constexpr int kTileKeys = 16;  // keys a round of the pipeline

struct VerifyParams {
  const uint16_t* q;     // bf16 [rows, q_stride]: heads x 576
  int64_t q_stride;      // elements
  const uint16_t* pool;  // bf16 [slots, 576], rows pool_stride_bytes apart
  int pool_stride_bytes;
  uint16_t* out;  // bf16 [rows, out_stride]: heads x 512
  int64_t out_stride;
  int heads;
  float heads_inverse;
  float scale_log2;  // softmax scale times log2(e)
  int sequences;
  const int32_t* row_begin;
  const int32_t* context_length;
  const uint8_t* causal;
  const int32_t* slot_table;
  int64_t table_stride;
  const uint64_t* ancestor_bits;
  // How the work is cut: `slots` blocks run at once; a split has at least min_split_keys keys (the last may
  // have fewer).
  int slots;
  int min_split_keys;
  // Partial results. One item is one (sequence, query tile, split).
  uint4* partial;        // [items][tile rows * 64]: half8 in the order the lanes hold them, see partial.cuh
  float2* partial_ml;    // [items][tile rows]: reference (log2) and sum
  float* partial_scale;  // [items][tile rows][4]: factor of each 128 columns
};

}  // namespace kdt::cuda
