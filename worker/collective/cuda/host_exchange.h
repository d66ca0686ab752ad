// Small records between the hosts of a group's ranks, over the segment they met in. Every rank calls the same
// in the same order.
#pragma once

#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/status.h"
#include "worker/collective/shm_segment.h"

namespace kdt {

class HostExchange {
 public:
  static constexpr size_t kBufferBytes = 4096;  // of the segment; the largest record

  explicit HostExchange(ShmSegment* segment) : segment_(segment) {}

  int rank() const { return segment_->rank(); }
  int size() const { return segment_->size(); }
  ShmSegment& segment() const { return *segment_; }
  void SetDeadline(absl::Time deadline) { deadline_ = deadline; }
  absl::Time deadline() const { return deadline_; }

  // Rank 0's record, rank 1's, ... Buffers alternate as in the shm collective, so one barrier is enough.
  template <typename T>
  absl::StatusOr<std::vector<T>> Gather(const T& mine) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= kBufferBytes);
    parity_ ^= 1;
    std::memcpy(segment_->Buffer(parity_, rank()), &mine, sizeof(T));
    KDT_RETURN_IF_ERROR(segment_->Barrier(deadline_));
    std::vector<T> all(static_cast<size_t>(size()));
    for (int rank = 0; rank < size(); ++rank) {
      std::memcpy(&all[static_cast<size_t>(rank)], segment_->Buffer(parity_, rank), sizeof(T));
    }
    return all;
  }

  // OK when it is OK on all ranks; otherwise the error of the lowest rank that has one, on all of them. So a
  // rank on which something fails does not leave the others waiting.
  absl::Status Agree(const absl::Status& mine) {
    struct Answer {
      int code;
      char text[1000];
    } answer{static_cast<int>(mine.code()), {}};
    const std::string text(mine.message());
    std::memcpy(answer.text, text.data(), std::min(text.size(), sizeof(answer.text) - 1));
    KDT_ASSIGN_OR_RETURN(const std::vector<Answer> all, Gather(answer));
    for (const Answer& one : all) {
      if (one.code != 0) return absl::Status(static_cast<absl::StatusCode>(one.code), one.text);
    }
    return absl::OkStatus();
  }

 private:
  ShmSegment* segment_;
  absl::Time deadline_ = absl::InfiniteFuture();
  int parity_ = 0;
};

}  // namespace kdt
