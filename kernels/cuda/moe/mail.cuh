// Activations from the block that makes them to those that read them, a few rows' worth: each pair of values
// lies beside the number of the launch that wrote it, in eight bytes that are written and read as one. Who
// finds the number has the values, so there is no flag to set behind a fence and to read in front of them,
// which would be three ways to L2 instead of one.
#pragma once

#include "kernels/cuda/moe/int4.cuh"

namespace kdt::cuda {

// Values 2 index and 2 index + 1.
__device__ __forceinline__ void PostPair(unsigned* mail, int index, uint32_t values, unsigned launch) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1,%2};" ::"l"(mail + 2 * index), "r"(values), "r"(launch)
               : "memory");
}

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
      uint4 two[2];  // a pair of values, its number, the next pair and its
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(two[half].x), "=r"(two[half].y), "=r"(two[half].z), "=r"(two[half].w)
                     : "l"(from + j * 32 + 4 * half)
                     : "memory");
        there = there && two[half].y == launch && two[half].w == launch;
      }
      inputs.of[j] = make_uint4(two[0].x, two[0].z, two[1].x, two[1].z);
    }
    if (__all_sync(~0u, there)) return;
  }
}

}  // namespace kdt::cuda
