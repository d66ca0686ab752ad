// Moves pool rows: for i = 0 .. count-1 in order, pool[to[i]] = pool[from[i]], in each of `layers` pools that
// lie `layer_stride` elements apart. Used by commit (accepted tree rows move forward: to[i] <= from[i], both
// rising, so the in-order copy never overwrites a row still to be read) and by relocation (ranges that do not
// overlap). A move of a row to itself is padding.
#pragma once

#include "kdt/kernels/tensor.h"

namespace kdt::kernels {

struct KvMoveArgs {
  const int32_t* from;  // [count]
  const int32_t* to;    // [count]
  int64_t count;
  Tensor pool;  // first layer's pool [slots, width]
  int64_t layers;
  int64_t layer_stride;  // elements from one layer's pool to the next
};

}  // namespace kdt::kernels
