// Small arrays that the host fills and a step reads, in one block with fixed addresses and one queued copy.
// Reserve everything, Allocate once, then fill and Upload each step. The host's side must not change between
// Upload and the end of the step.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "common/status.h"
#include "kdt/kernels/backend.h"

namespace kdt {

template <typename T>
struct Staged {
  size_t offset = 0;
};

class StagedBlock {
 public:
  template <typename T>
  Staged<T> Reserve(int64_t count) {
    constexpr size_t kAlignment = 64;
    const Staged<T> result{size_};
    size_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return result;
  }
  absl::Status Allocate(kernels::Backend& backend) {
    backend_ = &backend;
    KDT_ASSIGN_OR_RETURN(host_, kernels::HostBuffer::Make(backend, size_));
    KDT_ASSIGN_OR_RETURN(device_, kernels::Buffer::Make(backend, size_));
    return absl::OkStatus();
  }
  absl::Status Upload() { return backend_->UploadAsync(device_.data(), host_.data(), size_); }

  template <typename T>
  T* host(Staged<T> array) {
    return reinterpret_cast<T*>(host_.data() + array.offset);
  }
  template <typename T>
  T* device(Staged<T> array) const {
    return reinterpret_cast<T*>(device_.as<char>() + array.offset);
  }

 private:
  kernels::Backend* backend_ = nullptr;
  size_t size_ = 0;
  kernels::HostBuffer host_;
  kernels::Buffer device_;
};

}  // namespace kdt
