// Order statistics of a sample.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace kdt {

// The nearest-rank quantile q in [0, 1] of `values` (sorted here); 0 for an empty sample.
inline double Quantile(std::vector<double>& values, double q) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const auto rank = static_cast<size_t>(q * static_cast<double>(values.size() - 1) + 0.5);
  return values[std::min(rank, values.size() - 1)];
}

}  // namespace kdt
