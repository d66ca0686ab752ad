// What sampling and drafting need of a row of logits, of which each rank holds a shard of the vocabulary.
#pragma once

#include "kdt/kernels/tensor.h"

namespace kdt::kernels {

inline constexpr int kMaxTopK = 64;

// Per row of this shard: the maximum, sum of exp(logit - max), whether a NaN or infinity was seen, and the k
// best logits (ties: lower id first), ids global.
struct LogitsTopKArgs {
  Tensor logits;  // f32 [rows, vocab_local]
  int64_t vocab_begin;
  int64_t k;       // 0 .. min(kMaxTopK, vocab_local)
  float* max;      // [rows]
  float* sum_exp;  // [rows]
  uint8_t* bad;    // [rows]: 1 when a logit is not finite
  int32_t* ids;    // [rows, k]
  float* values;   // [rows, k]
};

// argmax over this shard of logit / temperature + g(seed, position, id), g from common/rng.h; temperature 0:
// plain argmax. Ties: lower id. Ids with logit = -infinity are masked and never chosen unless all are (then
// id = -1). The arithmetic is float32: logit * (1 / temperature), then one addition of g.
struct GumbelArgmaxArgs {
  Tensor logits;  // f32 [rows, vocab_local], penalties and masks applied
  int64_t vocab_begin;
  const float* temperature;  // [rows]
  const uint64_t* seed;      // [rows]
  const int64_t* position;   // [rows]: absolute position of the token to be drawn
  int32_t* id;               // [rows] global
  float* value;              // [rows] the winning perturbed value
  int32_t* bad = nullptr;    // [rows] 1 when a logit is not finite, else 0; nullptr: not asked
};

// x[r] *= factor[r], each product rounded once.
struct ScaleRowsArgs {
  Tensor x;             // f32 [rows, cols]
  const float* factor;  // [rows]; rows with 1 are left alone
};

}  // namespace kdt::kernels
