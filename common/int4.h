// compressed-tensors "pack-quantized" INT4, symmetric, one BF16 scale for a group of input values. For a
// weight [out, in]:
//   weight_packed I32  [out, in / 8]      eight consecutive input values an int32; value i in bits 4i..4i+3,
//                                         as q + 8
//   weight_scale  BF16 [out, in / group]
//   weight_shape  I32  [2] = {out, in}
// w[o, i] = (nibble - 8) * scale[o, i / group].
// The scalar functions here are the oracle for the kernels; they are not meant to be fast.
#pragma once

#include <cstdint>

#include "common/bf16.h"

namespace kdt {

inline constexpr int64_t kInt4PerWord = 8;

// The value -8 .. 7 of input i (0 .. 7) of a packed word.
inline int Int4Value(uint32_t word, int i) { return static_cast<int>((word >> (4 * i)) & 0xfu) - 8; }

// w[row, column] of a weight with `in` input values.
inline float Int4Weight(const int32_t* packed, const uint16_t* scale, int64_t in, int64_t group, int64_t row,
                        int64_t column) {
  const uint32_t word = static_cast<uint32_t>(packed[row * (in / kInt4PerWord) + column / kInt4PerWord]);
  const float s = Bf16ToFloat(scale[row * (in / group) + column / group]);
  return static_cast<float>(Int4Value(word, static_cast<int>(column % kInt4PerWord))) * s;
}

// Rows [row_begin, row_end) to `out`, row-major [row_end - row_begin, in].
inline void Int4Dequantize(const int32_t* packed, const uint16_t* scale, int64_t in, int64_t group,
                           int64_t row_begin, int64_t row_end, float* out) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    for (int64_t column = 0; column < in; ++column)
      *out++ = Int4Weight(packed, scale, in, group, row, column);
  }
}

}  // namespace kdt
