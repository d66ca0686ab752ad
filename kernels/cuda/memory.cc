#include "kernels/cuda/memory.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/check.h"

namespace kdt::cuda {
namespace {

absl::Status NoMemory(const char* kind, size_t bytes, cudaError_t error) {
  (void)cudaGetLastError();  // an allocation that failed leaves no lasting error
  return absl::ResourceExhaustedError(
      absl::StrCat("cuda backend: no ", kind, " for ", bytes, " bytes: ", cudaGetErrorString(error)));
}

}  // namespace

absl::Status Memory::Refused(const char* call, size_t bytes) const {
  return absl::FailedPreconditionError(
      absl::StrCat("cuda backend: ", call, " of ", bytes, " bytes while the backend is sealed"));
}

absl::StatusOr<void*> Memory::Allocate(size_t bytes) {
  if (sealed_) return Refused("Allocate", bytes);
  void* data = nullptr;
  const size_t wanted = bytes == 0 ? 1 : bytes;
  if (const cudaError_t error = cudaMalloc(&data, wanted); error != cudaSuccess) {
    return NoMemory("memory", bytes, error);
  }
  ++stats_.allocations;
  if (absl::Status status = KDT_CUDA_STATUS(cudaMemsetAsync(data, 0, wanted, stream_)); !status.ok()) {
    Free(data);
    return status;
  }
  return data;
}

void Memory::Free(void* data) {
  if (data == nullptr) return;
  freed_while_sealed_ = freed_while_sealed_ || sealed_;
  ++stats_.frees;
  (void)cudaFree(data);  // an error has no one to go to
}

absl::StatusOr<void*> Memory::AllocateHost(size_t bytes) {
  if (sealed_) return Refused("AllocateHost", bytes);
  void* data = nullptr;
  const size_t wanted = bytes == 0 ? 1 : bytes;
  if (const cudaError_t error = cudaHostAlloc(&data, wanted, cudaHostAllocDefault); error != cudaSuccess) {
    return NoMemory("page-locked memory", bytes, error);
  }
  ++stats_.allocations;
  std::memset(data, 0, wanted);
  return data;
}

void Memory::FreeHost(void* data) {
  if (data == nullptr) return;
  freed_while_sealed_ = freed_while_sealed_ || sealed_;
  ++stats_.frees;
  (void)cudaFreeHost(data);
}

absl::Status Memory::Upload(void* device, const void* host, size_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  if (sealed_) return Refused("Upload", bytes);
  ++stats_.pageable_copies;
  return KDT_CUDA_STATUS(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream_));
}

absl::Status Memory::Download(void* host, const void* device, size_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  if (sealed_) return Refused("Download", bytes);
  ++stats_.pageable_copies;
  KDT_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream_));
  return Synchronize();
}

absl::Status Memory::Synchronize() {
  ++stats_.synchronisations;
  KDT_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream_));
  if (sealed_ && freed_while_sealed_) {
    freed_while_sealed_ = false;
    return absl::FailedPreconditionError("cuda backend: memory was freed while the backend is sealed");
  }
  return absl::OkStatus();
}

}  // namespace kdt::cuda
