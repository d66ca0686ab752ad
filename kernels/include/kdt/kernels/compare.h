// How far a matrix is from a reference, counted in bf16 steps: what validate mode asks of the fast kernels.
//
// A step is 2^(e - 7), e being the exponent of a number rounded to bf16. Two measures, because an output near
// zero can be a sum whose terms cancel, which no kernel with short probabilities has to its own last digit:
//   own step   of the reference's value itself
//   row step   of the largest reference value of the row
// The reference is rounded to bf16 before the difference is taken, so two results that round alike are 0
// apart. A value and a reference that are both NaN, or the same infinity, are 0 apart; when only one is, they
// are infinitely far apart.
#pragma once

#include "kdt/kernels/tensor.h"

namespace kdt::kernels {

// Lies in the backend's memory; Compare adds to it, the caller clears it (all zero bytes).
struct CompareStats {
  uint64_t values;             // compared
  uint64_t beyond_one;         // of them more than one own step away
  uint64_t beyond_one_of_row;  // of them more than one row step away
  float largest;               // distance, own steps
  float largest_of_row;        // distance, row steps
};

struct CompareArgs {
  Tensor value;                        // [rows, cols]
  Tensor reference;                    // [rows, cols], of the same dtype
  const int32_t* used_rows = nullptr;  // backend's memory: only the first *used_rows rows count; nullptr: all
  CompareStats* stats = nullptr;
};

}  // namespace kdt::kernels
