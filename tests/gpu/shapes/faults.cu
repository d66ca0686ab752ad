#include "kernels/cuda/common/ptx.cuh"
#include "tests/gpu/shapes/faults.h"
#include "tests/gpu/shapes/shapes.h"

namespace kdt::shapes {
namespace {

constexpr int kThreads = 64;

// Reads one value behind the array.
__global__ void Beyond(const int* in, int* out) { out[threadIdx.x] = in[threadIdx.x + 1]; }
// Each warp reads what the other one writes.
__global__ void Race(const int* in, int* out) {
  __shared__ int values[kThreads];
  values[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = values[kThreads - 1 - threadIdx.x];
}
// A barrier of 64 threads to which 48 come, from two places.
__global__ void Short(const int* in, int* out) {
  out[threadIdx.x] = in[threadIdx.x];
  if (threadIdx.x < 32) {
    cuda::NamedBarrier(1, kThreads);
  } else if (threadIdx.x < 48) {
    cuda::NamedBarrier(1, kThreads);
  }
}
__global__ void Copies(const int* in, int* out) { out[threadIdx.x] = in[threadIdx.x] + 1; }

}  // namespace

std::vector<std::string> Faults() { return {"memcheck", "racecheck", "initcheck", "synccheck"}; }

void RunFault(const std::string& tool) {
  int *in = nullptr, *out = nullptr;
  Check(cudaMalloc(&in, kThreads * sizeof(int)), "device memory");
  Check(cudaMalloc(&out, kThreads * sizeof(int)), "device memory");
  if (tool != "initcheck") Check(cudaMemset(in, 0, kThreads * sizeof(int)), "an input");
  const auto kernel = tool == "memcheck"    ? Beyond
                      : tool == "racecheck" ? Race
                      : tool == "synccheck" ? Short
                                            : Copies;
  kernel<<<1, kThreads>>>(in, out);
  cudaDeviceSynchronize();  // a tool may have stopped the kernel
  cudaFree(in);
  cudaFree(out);
}

}  // namespace kdt::shapes
