// Monotonic time for measuring; never goes back, not the time of day.
#pragma once

#include <chrono>
#include <cstdint>

namespace kdt {

inline int64_t MonotonicMicros() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

inline int64_t MonotonicNanos() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Of two times in microseconds; 0 when `to_us` lies before `from_us`.
inline double SecondsBetween(int64_t from_us, int64_t to_us) {
  return to_us > from_us ? static_cast<double>(to_us - from_us) * 1e-6 : 0;
}

}  // namespace kdt
