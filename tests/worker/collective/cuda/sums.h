// Test values of a rank, and what their sum must be in every bit.
#pragma once

#include <cstdint>
#include <vector>

#include "kdt/kernels/tensor.h"

namespace kdt {

// Bytes of `count` values of `rank`, different for each `salt`.
std::vector<char> RankValues(int rank, kernels::DType type, int64_t count, uint32_t salt);

// The sum over ranks 0 .. ranks - 1 in that order, in float32, rounded once.
std::vector<char> SumOfRanks(int ranks, kernels::DType type, int64_t count, uint32_t salt);

}  // namespace kdt
