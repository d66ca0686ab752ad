#include "tests/worker/collective/cuda/sums.h"

#include <cstring>

#include "common/bf16.h"

namespace kdt {
namespace {

// In about -1 .. 1, with all mantissa bits in use, so that another order of the sum shows.
float Value(int rank, int64_t i, uint32_t salt) {
  uint32_t x = static_cast<uint32_t>(i) * 2654435761u + static_cast<uint32_t>(rank + 1) * 0x9e3779b9u +
               salt * 0x85ebca6bu;
  x ^= x >> 15;
  x *= 0x2c1b3c6du;
  x ^= x >> 12;
  return static_cast<float>(static_cast<int32_t>(x)) * 0x1p-31f;
}

void Put(std::vector<char>* bytes, kernels::DType type, int64_t i, float value) {
  if (type == kernels::DType::kF32) {
    std::memcpy(bytes->data() + i * 4, &value, 4);
  } else {
    const uint16_t bits = FloatToBf16(value);
    std::memcpy(bytes->data() + i * 2, &bits, 2);
  }
}

}  // namespace

std::vector<char> RankValues(int rank, kernels::DType type, int64_t count, uint32_t salt) {
  std::vector<char> bytes(static_cast<size_t>(count * kernels::DTypeSize(type)));
  for (int64_t i = 0; i < count; ++i) Put(&bytes, type, i, Value(rank, i, salt));
  return bytes;
}

std::vector<char> SumOfRanks(int ranks, kernels::DType type, int64_t count, uint32_t salt) {
  std::vector<char> bytes(static_cast<size_t>(count * kernels::DTypeSize(type)));
  for (int64_t i = 0; i < count; ++i) {
    float sum = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      float value = Value(rank, i, salt);
      if (type == kernels::DType::kBF16) value = Bf16ToFloat(FloatToBf16(value));
      sum = rank == 0 ? value : sum + value;
    }
    Put(&bytes, type, i, sum);
  }
  return bytes;
}

}  // namespace kdt
