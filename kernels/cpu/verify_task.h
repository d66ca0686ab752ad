// The unit of work of verify_attention.
#pragma once

#include <cstdint>

namespace kdt::kernels::cpu {

// Rows [row, row + rows) and heads [head, head + heads) of one sequence.
struct VerifyTask {
  int64_t sequence, row, rows, head, heads;
};

inline constexpr int64_t kTaskQueries =
    64;  // most queries (row, head) of a task; they share each block of keys

}  // namespace kdt::kernels::cpu
