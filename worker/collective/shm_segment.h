// The shared-memory segment behind a group of ranks on one host: rendezvous, barrier, abort flag and exchange
// buffers.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/collective/shm_leftovers.h"

namespace kdt {

class ShmSegment {
 public:
  // As MakeShmCollective. The segment has, for each of two parities, one buffer of `buffer_bytes` a rank and
  // one of the same size for results.
  static absl::StatusOr<std::unique_ptr<ShmSegment>> Join(const std::string& id, int rank, int size,
                                                          size_t buffer_bytes, absl::Duration timeout,
                                                          const std::atomic<bool>* cancelled);
  // Leaves the group: whoever still waits is woken.
  ~ShmSegment();
  ShmSegment(const ShmSegment&) = delete;
  ShmSegment& operator=(const ShmSegment&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  size_t buffer_bytes() const { return buffer_bytes_; }
  std::byte* Buffer(int parity, int rank) const;
  std::byte* Result(int parity) const { return Buffer(parity, size_); }

  // Waits until every rank is here. After an error (those of Collective) the segment is of no use any more,
  // and every other rank gets an error too.
  absl::Status Barrier(absl::Time deadline);
  void Abort();

  // For ranks that meet elsewhere, on GPUs, and come here only to learn how the group is.
  // OK while the group lives, else the error that every Barrier gives.
  absl::Status State();
  // Tells the others how many steps this rank has come to; Behind: the ranks, as bits, that are not there
  // yet.
  void SetProgress(uint32_t steps);
  uint64_t Behind(uint32_t steps) const;
  // Ends the group if the process of a rank has ended.
  void FindDead();
  // Ends the group because of ranks (bits) that did not come in time; returns State().
  absl::Status EndLate(uint64_t ranks);

  int64_t wait_ns() const { return wait_ns_.load(std::memory_order_relaxed); }

 private:
  struct Header;
  ShmSegment() = default;
  absl::Status Create(const std::string& path);
  absl::Status Open(const std::string& path, absl::Time deadline);
  absl::Status Map(int fd);
  absl::Status Claim();

  // Ranks as bits.
  uint64_t Missing() const;
  uint64_t Ended(uint64_t ranks) const;
  void EndGroup(std::atomic<uint64_t>* cause, uint64_t ranks);
  absl::Status EndedStatus() const;
  std::string Names(uint64_t ranks, bool processes) const;
  bool Cancelled() const { return cancelled_ != nullptr && cancelled_->load(std::memory_order_relaxed); }

  int rank_ = 0;
  int size_ = 0;
  int fd_ = -1;  // holds this rank's byte lock: the system drops it when the process ends
  size_t buffer_bytes_ = 0;
  size_t mapped_bytes_ = 0;
  Header* header_ = nullptr;
  std::byte* data_ = nullptr;
  uint32_t barriers_ = 0;  // come to by this rank
  int spins_ = 0;          // looks at the generation before it sleeps
  const std::atomic<bool>* cancelled_ = nullptr;
  std::atomic<bool> aborted_{false};  // by this rank
  std::atomic<int64_t> wait_ns_{0};
};

}  // namespace kdt
