// Copies many pieces of host memory (a mapped checkpoint) to a device: several threads read into a ring of
// page-locked buffers while the device takes full ones. Host memory is bounded by the ring.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kdt/kernels/backend.h"

namespace kdt {

class ParallelCopy {
 public:
  // Rows of `row_bytes` that begin `stride` bytes apart; they go to `to` without gaps.
  struct Piece {
    const std::byte* from = nullptr;
    int64_t rows = 0;
    int64_t stride = 0;
    int64_t row_bytes = 0;  // at most kBufferBytes
    char* to = nullptr;     // device memory
    size_t tag = 0;         // of the caller
  };
  // What has been read of a piece, first to last byte. Called from several threads.
  using Read = std::function<void(size_t tag, std::span<const std::byte> bytes)>;

  static constexpr int64_t kBufferBytes = 16 << 20;

  void Add(Piece piece);
  // Copies everything that was added and forgets it. `threads`: most that read; few bytes take fewer.
  // `progress` is called on this thread with the bytes copied since the call before.
  absl::Status Run(kernels::Backend& backend, int threads, const Read& read,
                   const std::function<void(uint64_t)>& progress);

 private:
  struct Batch {  // what fills one buffer
    size_t begin = 0, end = 0;
    int64_t bytes = 0;
  };
  std::vector<Piece> pieces_;
  std::vector<Batch> batches_;
};

}  // namespace kdt
