// Which part of a dimension one rank of a tensor-parallel group holds: equal ranges in rank order.
#pragma once

#include <cstdint>

namespace kdt {

struct Shard {
  int rank = 0;
  int size = 1;

  // `n` is a multiple of `size` (checked when the configs are).
  int64_t Count(int64_t n) const { return n / size; }
  int64_t Begin(int64_t n) const { return n / size * rank; }
};

// How a MoE layer's routed experts are spread over the ranks: a slice of every expert's inner width each, or
// whole experts each.
enum class MoeSharding : uint8_t { kTensor, kExpert };

}  // namespace kdt
