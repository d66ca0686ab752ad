// Pearson's chi-square test of counts against expected counts.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

namespace kdt::testing {

// Upper regularised incomplete gamma function Q(a, x), by its series or continued fraction (Abramowitz and
// Stegun 6.5.29 and 6.5.31).
inline double UpperGammaQ(double a, double x) {
  if (x <= 0) return 1;
  const double scale = std::exp(a * std::log(x) - x - std::lgamma(a));
  if (x < a + 1) {
    double term = 1 / a, sum = term;
    for (double n = a + 1; std::abs(term) > 1e-15 * std::abs(sum); ++n) {
      term *= x / n;
      sum += term;
    }
    return 1 - scale * sum;
  }
  double b = x + 1 - a, c = 1e300, d = 1 / b, h = d;
  for (int i = 1; i < 10000; ++i) {
    const double an = -i * (i - a);
    b += 2;
    d = 1 / (an * d + b);
    c = b + an / c;
    const double step = d * c;
    h *= step;
    if (std::abs(step - 1) < 1e-15) break;
  }
  return scale * h;
}

// Probability of a statistic at least this large when `expected` is true; cells - 1 degrees of freedom.
inline double ChiSquarePValue(const std::vector<double>& observed, const std::vector<double>& expected) {
  double statistic = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    statistic += (observed[i] - expected[i]) * (observed[i] - expected[i]) / expected[i];
  }
  return UpperGammaQ(static_cast<double>(expected.size() - 1) / 2, statistic / 2);
}

}  // namespace kdt::testing
