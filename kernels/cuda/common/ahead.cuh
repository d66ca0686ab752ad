// Fetching constants that later kernels will read into L2 (kdt/kernels/ahead.h): every block of a grid asks for
// its share and goes on. Constants may be read at any time, so it stands before WaitForPrevious().
#pragma once

#include "kdt/kernels/ahead.h"
#include "kernels/cuda/common/ptx.cuh"

namespace kdt::cuda {

inline constexpr uint32_t kAheadPiece = 4096;  // bytes an instruction asks for

// To be called by `threads` threads of each of `blocks` blocks, with their number in the block; neighbouring
// pieces fall to different blocks. What a list has beside whole units of 16 bytes is left out.
__device__ __forceinline__ void FetchAhead(const kernels::Ahead& ahead, int block, int blocks, int thread,
                                           int threads) {
#pragma unroll
  for (int i = 0; i < kernels::kAheadParts; ++i) {
    const auto bytes = static_cast<uint32_t>(ahead.part[i].bytes) & ~15u;
    const uint32_t step = static_cast<uint32_t>(blocks * threads) * kAheadPiece;
    const char* const data = static_cast<const char*>(ahead.part[i].data);
    for (uint32_t at = static_cast<uint32_t>(thread * blocks + block) * kAheadPiece; at < bytes; at += step) {
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(data + at),
                   "r"(min(kAheadPiece, bytes - at))
                   : "memory");
    }
  }
}

}  // namespace kdt::cuda
