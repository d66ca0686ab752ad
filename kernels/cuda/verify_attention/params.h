// What the two kernels of verify_attention are launched with. kdt/kernels/verify_attention.h gives the
// meaning.
#pragma once

#include <cstdint>

namespace kdt::cuda {

inline constexpr int kLatent = 512;
inline constexpr int kRope = 64;
inline constexpr int kKeyWidth = kLatent + kRope;
inline constexpr int kTileKeys = 16;  // keys a round of the pipeline

// The sequences one configuration of the partial kernel works on, told by their query rows (rows times
// heads), and where its results go. One item is one (sequence, query tile, split).
struct VerifyClass {
  int min_queries, max_queries;  // the sequences that bring as many, both included
  int tile_shift;                // log2 of the query rows of a tile
  // A sequence of fewer keys than this has tiles of half the rows. A lone sequence only, else 0.
  int narrow_below;
  // How the work is cut: `slots` blocks run at once; a split has at least min_split_keys keys (the last may
  // have fewer).
  int slots;
  int min_split_keys;
  bool rests;            // the launch has blocks for one split a tile more (plan.cuh)
  bool own_length_only;  // the splits of a sequence depend on its own length alone: one for each
                         // min_split_keys keys
  // Partial results, in the order the lanes hold them (outputs.cuh): the upper 24 bits of float32, upper
  // halves and third bytes apart.
  uint4* partial;      // [items][tile rows * 64]: upper halves
  uint2* partial_low;  // [items][tile rows * 64]: third bytes
  float2* partial_ml;  // [items][tile rows]: reference (log2) and sum
};
inline constexpr int kMaxClasses = 2;

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
};

struct VerifyClasses {
  int count;
  VerifyClass of[kMaxClasses];
};

}  // namespace kdt::cuda
