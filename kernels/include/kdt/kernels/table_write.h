// table[index[i]] = value[i] for i = 0 .. count-1; an index below 0 is padding and writes nothing. Indices
// that are not padding are distinct. Used for the slots that a step adds to its sequences' tables.
#pragma once

#include <cstdint>

namespace kdt::kernels {

struct TableWriteArgs {
  const int64_t* index;  // [count]
  const int32_t* value;  // [count]
  int64_t count;
  int32_t* table;
};

}  // namespace kdt::kernels
