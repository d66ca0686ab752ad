// Ranks as processes, and what rank 0 tells the others.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"

namespace kdt::bench {

inline constexpr int kMaxSequences = 256;

// In memory that the ranks share. Rank 0 alone learns what a step accepted.
struct Told {
  std::atomic<uint64_t> tellings{0};
  uint32_t starts[kMaxSequences];  // of the step's sequences, behind the last telling
};

// Runs body(rank, told) in `ranks` processes, which must not have touched the GPU yet. The first that fails
// ends the others.
absl::Status RunRanks(int ranks, const std::function<absl::Status(int, Told*)>& body);

}  // namespace kdt::bench
