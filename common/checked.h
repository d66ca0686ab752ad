// Arithmetic on sizes that come from outside: a product that does not fit is an error, never a wrapped
// number.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace kdt {

// nullopt when the exact result does not fit in 64 unsigned bits.
inline std::optional<uint64_t> CheckedMul(uint64_t a, uint64_t b) {
  uint64_t result;
  if (__builtin_mul_overflow(a, b, &result)) return std::nullopt;
  return result;
}

// Product of all extents; 1 for an empty list. nullopt on overflow or on a negative extent.
inline std::optional<uint64_t> CheckedProduct(std::span<const int64_t> extents) {
  std::optional<uint64_t> result = 1;
  bool has_zero = false;
  for (int64_t extent : extents) {
    if (extent < 0) return std::nullopt;
    has_zero |= extent == 0;
  }
  // A zero must not hide an overflow of the others: 0 x 2^63 x 2^63 is refused as well.
  for (int64_t extent : extents) {
    if (extent == 0) continue;
    result = CheckedMul(*result, static_cast<uint64_t>(extent));
    if (!result) return std::nullopt;
  }
  return has_zero ? 0 : result;
}

}  // namespace kdt
