#include "worker/model/parallel_copy.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>

#include "common/status.h"

namespace kdt {
namespace {

// A thread more is worth while for each of these.
constexpr int64_t kBytesAThread = 64 << 20;
// Buffers that are with the device while every thread fills one.
constexpr int kBuffersInFlight = 4;

// Hands buffers round between the reading threads and the one that feeds the device.
class Ring {
 public:
  struct Full {
    int buffer;
    size_t batch;
  };

  Ring(int buffers, size_t batches) : batches_(batches) {
    for (int i = 0; i < buffers; ++i) free_.push_back(i);
  }

  // A batch to read and a buffer for it; false: there is nothing left to do.
  bool Take(Full* work) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stopped_ || next_ == batches_ || !free_.empty(); });
    if (stopped_ || next_ == batches_) return false;
    *work = {free_.back(), next_++};
    free_.pop_back();
    if (next_ == batches_) changed_.notify_all();
    return true;
  }
  void PutFull(Full work) {
    const std::scoped_lock lock(mutex_);
    full_.push_back(work);
    changed_.notify_all();
  }
  // At least one; waits for it.
  std::vector<Full> TakeFull() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !full_.empty(); });
    return std::exchange(full_, {});
  }
  void PutFree(std::span<const Full> done) {
    const std::scoped_lock lock(mutex_);
    for (const Full& work : done) free_.push_back(work.buffer);
    changed_.notify_all();
  }
  void Stop() {
    const std::scoped_lock lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
  }

 private:
  const size_t batches_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int> free_;
  std::vector<Full> full_;
  size_t next_ = 0;
  bool stopped_ = false;
};

}  // namespace

void ParallelCopy::Add(Piece piece) {
  while (piece.rows > 0) {
    if (batches_.empty() || batches_.back().bytes + piece.row_bytes > kBufferBytes) {
      batches_.push_back({pieces_.size(), pieces_.size(), 0});
    }
    Batch& batch = batches_.back();
    Piece part = piece;
    part.rows = std::min(piece.rows, (kBufferBytes - batch.bytes) / piece.row_bytes);
    pieces_.push_back(part);
    batch.end = pieces_.size();
    batch.bytes += part.rows * part.row_bytes;
    piece.rows -= part.rows;
    piece.from += part.rows * part.stride;
    piece.to += part.rows * part.row_bytes;
  }
}

absl::Status ParallelCopy::Run(kernels::Backend& backend, int threads, const Read& read,
                               const std::function<void(uint64_t)>& progress) {
  const std::vector<Piece> pieces = std::exchange(pieces_, {});
  const std::vector<Batch> batches = std::exchange(batches_, {});
  if (batches.empty()) return absl::OkStatus();
  int64_t total = 0, largest = 0;
  for (const Batch& batch : batches) {
    total += batch.bytes;
    largest = std::max(largest, batch.bytes);
  }
  const int readers = static_cast<int>(std::clamp<int64_t>(total / kBytesAThread, 1, std::max(1, threads)));
  const int buffers = static_cast<int>(std::min<size_t>(readers + kBuffersInFlight, batches.size()));
  KDT_ASSIGN_OR_RETURN(void* memory, backend.AllocateHost(static_cast<size_t>(buffers) * largest));
  const auto buffer = [&](int i) { return static_cast<char*>(memory) + static_cast<int64_t>(i) * largest; };

  Ring ring(buffers, batches.size());
  const auto fill = [&] {
    Ring::Full work;
    while (ring.Take(&work)) {
      char* to = buffer(work.buffer);
      for (size_t p = batches[work.batch].begin; p < batches[work.batch].end; ++p) {
        const Piece& piece = pieces[p];
        if (piece.stride == piece.row_bytes) {
          std::memcpy(to, piece.from, piece.rows * piece.row_bytes);
        } else {
          for (int64_t row = 0; row < piece.rows; ++row) {
            std::memcpy(to + row * piece.row_bytes, piece.from + row * piece.stride, piece.row_bytes);
          }
        }
        to += piece.rows * piece.row_bytes;
        read(piece.tag, {piece.from, static_cast<size_t>((piece.rows - 1) * piece.stride + piece.row_bytes)});
      }
      ring.PutFull(work);
    }
  };
  std::vector<std::thread> team;
  for (int i = 0; i < readers; ++i) team.emplace_back(fill);

  const auto send = [&](const Ring::Full& work) -> absl::Status {
    const Batch& batch = batches[work.batch];
    const char* from = buffer(work.buffer);
    for (size_t p = batch.begin; p < batch.end;) {
      char* const to = pieces[p].to;
      // Pieces that lie behind each other on the device as well; those of another tag may be another
      // allocation, and no copy may span two.
      const size_t tag = pieces[p].tag;
      int64_t bytes = 0;
      for (; p < batch.end && pieces[p].tag == tag && pieces[p].to == to + bytes; ++p) {
        bytes += pieces[p].rows * pieces[p].row_bytes;
      }
      KDT_RETURN_IF_ERROR(backend.UploadAsync(to, from, bytes));
      from += bytes;
    }
    return absl::OkStatus();
  };
  absl::Status status;
  for (size_t done = 0; done < batches.size() && status.ok();) {
    const std::vector<Ring::Full> full = ring.TakeFull();
    uint64_t bytes = 0;
    for (const Ring::Full& work : full) {
      if (status.ok()) status = send(work);
      bytes += batches[work.batch].bytes;
    }
    // One wait for all that are full; meanwhile the threads fill the others.
    if (const absl::Status finished = backend.Synchronize(); status.ok()) status = finished;
    ring.PutFree(full);
    done += full.size();
    if (status.ok()) progress(bytes);
  }
  ring.Stop();
  for (std::thread& thread : team) thread.join();
  backend.FreeHost(memory);
  return status;
}

}  // namespace kdt
