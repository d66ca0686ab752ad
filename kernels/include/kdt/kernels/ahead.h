// A hint beside an op's arguments: constants of the model (weights) that ops soon behind it will read. A backend may
// fetch them into the nearest cache while this op leaves memory idle. It changes no result, nothing waits for it, and the
// CPU ignores it. The memory has to stay what it is for as long as the backend lives, as weights do.
#pragma once

#include <cstdint>

namespace kdt::kernels {

struct AheadPart {
  const void* data = nullptr;
  int64_t bytes = 0;  // 0: nothing
};

inline constexpr int kAheadParts = 4;

struct Ahead {
  AheadPart part[kAheadParts];  // fetched in this order
};

}  // namespace kdt::kernels
