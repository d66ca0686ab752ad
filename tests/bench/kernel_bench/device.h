// Device-side helpers of the kernel benchmark.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace kdt::bench {

// Keeps the stream busy, so that what is queued behind it runs back to back.
void Delay(cudaStream_t stream, int64_t nanoseconds);
// Pseudo-random bf16 values, roughly normal.
void FillNormal(cudaStream_t stream, void* data, size_t values, uint32_t seed, float scale);
// Random bits.
void FillBits(cudaStream_t stream, void* data, size_t words, uint32_t seed);
// Reads `bytes` once with 16-byte loads.
void ReadAll(cudaStream_t stream, const void* data, size_t bytes, float* sink);
// `rounds` times 64 independent-enough m16n8k16 products a warp, eight warps a multiprocessor and more;
// returns the FLOP.
double MmaAll(cudaStream_t stream, int processors, int rounds, float* sink);

}  // namespace kdt::bench
