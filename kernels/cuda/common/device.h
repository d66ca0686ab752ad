// What kernels' shapes depend on beside the number of multiprocessors.
#pragma once

#include <cuda_runtime_api.h>

namespace kdt::cuda {

// Shared memory of a multiprocessor, in bytes; 0 where the device does not tell.
inline int SharedOfMultiprocessor() {
  static const int bytes = [] {
    int device = 0, shared = 0;
    const bool known =
        cudaGetDevice(&device) == cudaSuccess &&
        cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device) == cudaSuccess;
    return known ? shared : 0;
  }();
  return bytes;
}
// Whether a multiprocessor has room for two of the largest blocks there are (101,376 bytes, the most that
// all devices give one).
inline bool HoldsTwoLargest() { return SharedOfMultiprocessor() >= 200 * 1024; }

}  // namespace kdt::cuda
