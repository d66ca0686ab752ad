// Values from the block that makes them to those that read them, a few rows' worth: each pair of bf16 lies
// beside the number of the launch that wrote it, in one word that is written and read as a whole. Who finds
// the number has the values, so there is no flag to set behind a fence and to read in front of them, which
// would be three ways to L2 instead of one. Mail never written has number zero. Numbers come again after 2^32
// launches: what was last written exactly so many launches ago would be taken for new, which takes days
// without any launch of as many rows, and then one at that very launch.
#pragma once

#include <cstdint>

namespace kdt::cuda {

// Values 2 index and 2 index + 1.
__device__ __forceinline__ void PostPair(unsigned* mail, int index, uint32_t values, unsigned launch) {
  const uint64_t word = static_cast<uint64_t>(launch) << 32 | values;
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(mail + 2 * index), "l"(word) : "memory");
}

// False: not all of it is there yet.
__device__ __forceinline__ bool TakePair(uint32_t& values, const unsigned* mail, int index, unsigned launch) {
  uint64_t word;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(word) : "l"(mail + 2 * index) : "memory");
  values = static_cast<uint32_t>(word);
  return static_cast<uint32_t>(word >> 32) == launch;
}
// Two pairs, the first at an even `index`.
__device__ __forceinline__ bool TakePairs2(uint2& values, const unsigned* mail, int index, unsigned launch) {
  uint64_t first, second;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0,%1}, [%2];"
               : "=l"(first), "=l"(second)
               : "l"(mail + 2 * index)
               : "memory");
  values = make_uint2(static_cast<uint32_t>(first), static_cast<uint32_t>(second));
  return static_cast<uint32_t>(first >> 32) == launch && static_cast<uint32_t>(second >> 32) == launch;
}

}  // namespace kdt::cuda
