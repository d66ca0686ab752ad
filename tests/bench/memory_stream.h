// How fast the machine reads memory: the yardstick for kernels whose time is the reading of weights.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kdt::bench {

// Reads every byte of [data, data + bytes) once, eight independent sums wide, and returns a sum of it (so
// that the reads happen). bytes is a multiple of 512, data aligned to 8. One thread; call it from several for
// more.
#if defined(__x86_64__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
inline uint64_t
StreamRead(const void* data, size_t bytes) {
  constexpr size_t kWords = 64;
  const uint64_t* words = static_cast<const uint64_t*>(data);
  uint64_t sums[kWords] = {};
  for (size_t i = 0; i < bytes / sizeof(uint64_t); i += kWords) {
    for (size_t j = 0; j < kWords; ++j) sums[j] += words[i + j];
  }
  uint64_t sum = 0;
  for (size_t j = 0; j < kWords; ++j) sum += sums[j];
  return sum;
}

}  // namespace kdt::bench
