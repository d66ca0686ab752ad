// The (row, expert) pairs of a mixture-of-experts call, sorted by expert, rows rising within one.
#pragma once

#include <cstdint>

namespace kdt::kernels::cpu {

struct MoePairs {
  const int32_t* begin;      // [experts + 1]: expert e's pairs are begin[e] .. begin[e + 1] - 1
  const int32_t* row;        // [pairs]
  const float* weight;       // [pairs]
  const float** x;           // [pairs] packed input row
  const float** activation;  // [pairs] packed inner row
};

}  // namespace kdt::kernels::cpu
