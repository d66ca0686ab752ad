// Reading mail (common/mail.cuh) as a lane's inputs.
#pragma once

#include "kernels/cuda/common/mail.cuh"
#include "kernels/cuda/moe/int4.cuh"

namespace kdt::cuda {

// A lane's Inputs of kGroups groups, of which `groups` are there, the first of them at pair `index`; waits
// for them.
template <int kGroups, bool kAll>
__device__ __forceinline__ void ReadMail(Inputs& inputs, const unsigned* mail, int index, int groups,
                                         unsigned launch) {
  const unsigned* const from = mail + 2 * index;
  for (;;) {
    bool there = true;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      if (!kAll && j >= groups) {
        inputs.of[j] = make_uint4(0, 0, 0, 0);
        continue;
      }
      uint64_t pair[4];
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        asm volatile("ld.relaxed.gpu.global.v2.b64 {%0,%1}, [%2];"
                     : "=l"(pair[i]), "=l"(pair[i + 1])
                     : "l"(from + j * 32 + 2 * i)
                     : "memory");
        there = there && static_cast<uint32_t>(pair[i] >> 32) == launch &&
                static_cast<uint32_t>(pair[i + 1] >> 32) == launch;
      }
      inputs.of[j] = make_uint4(static_cast<uint32_t>(pair[0]), static_cast<uint32_t>(pair[1]),
                                static_cast<uint32_t>(pair[2]), static_cast<uint32_t>(pair[3]));
    }
    if (__all_sync(~0u, there)) return;
  }
}

// Of the kMailRow values of a pair eight of each lane to shared memory, when they are there.
inline constexpr int kMailRow = 256;
__device__ __forceinline__ void ReadMailRow(float* to, const unsigned* mail, int pair, unsigned launch,
                                            int lane) {
  const unsigned* const from = mail + pair * kMailRow + lane * 4;
  uint64_t word[4];
  bool there;
  do {
    there = true;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      asm volatile("ld.relaxed.gpu.global.v2.b64 {%0,%1}, [%2];"
                   : "=l"(word[i]), "=l"(word[i + 1])
                   : "l"(from + i * 64)
                   : "memory");
      there = there && static_cast<uint32_t>(word[i] >> 32) == launch &&
              static_cast<uint32_t>(word[i + 1] >> 32) == launch;
    }
  } while (!__all_sync(~0u, there));
  uint2* const row = reinterpret_cast<uint2*>(to) + lane;
#pragma unroll
  for (int i = 0; i < 2; ++i)
    row[32 * i] = make_uint2(static_cast<uint32_t>(word[2 * i]), static_cast<uint32_t>(word[2 * i + 1]));
}

// Of eight groups' values, the first of them at pair `index`, the eight that row.cuh wants of a lane. All
// blocks ask for a row that is alone, again and again, and so keep each other waiting, and the stores too:
// there are copies of the row, and with kOnce what a lane has it does not ask for again.
inline constexpr int kMailCopies = 4;
template <bool kOnce>
__device__ __forceinline__ uint4 ReadMailGroups(const unsigned* mail, int index, unsigned launch, int lane) {
  uint2 low, high;
  bool first = false, second = false;
  do {
    if (!kOnce || !first) first = TakePairs2(low, mail, index + lane * 4, launch);
    if (!kOnce || !second) second = TakePairs2(high, mail, index + lane * 4 + 2, launch);
  } while (!__all_sync(~0u, first && second));
  return make_uint4(low.x, low.y, high.x, high.y);
}

}  // namespace kdt::cuda
