// Forming a group: wait until every rank has loaded, check that they belong together, join them in a new
// epoch.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/group/group.h"
#include "coordinator/group/rank_link.h"
#include "coordinator/group/rank_poll.h"

namespace kdt {

struct FormedGroup {
  uint64_t epoch = 0;
  GroupLimits limits;
  std::vector<v1::DescribeResponse> ranks;  // by rank
};

// INVALID_ARGUMENT naming the rank when the descriptions do not make one group: rank, tp, checkpoint, GPUs,
// sizes.
absl::StatusOr<GroupLimits> CheckDescriptions(const std::vector<v1::DescribeResponse>& ranks);

// A log line that comes again and again: due when it is new, and every 10 s while it stays the same.
class SeldomLine {
 public:
  explicit SeldomLine(int64_t shortest_us = 0) : shortest_us_(shortest_us) {}
  bool Due(const std::string& line, int64_t now_us);
  void Forget() { told_us_ = 0; }  // the next is due

 private:
  const int64_t shortest_us_;  // between two lines that differ
  std::string told_;
  int64_t told_us_ = 0;
};

// One for all attempts: what a rank said before it ended is told while it is missing. One attempt at a time.
class GroupForming {
 public:
  // Called by the thread that forms.
  struct Listener {
    std::function<void(const std::string&)> on_waiting;  // what is waited for
    std::function<void(uint32_t rank, const RankPoll::Heard&)> on_heard;
    std::function<void(uint32_t rank, const std::string&)> on_rank_error;  // why it is no part of a group
  };

  // A rank that does not tell of itself within `describe_timeout_ms` is silent. `links` outlives this.
  GroupForming(const RankLinks& links, int describe_timeout_ms, Listener listener);

  // Blocks; polls as long as ranks are loading. `cancelled` is asked between polls (CANCELLED). Errors name
  // the rank. The epoch is larger than `last_epoch` and than any that a rank has told. Once there was
  // an epoch a rank that listens and is silent three times in a row hangs: the ranks that answer are then
  // ended.
  absl::StatusOr<FormedGroup> Form(uint64_t last_epoch, const std::function<bool()>& cancelled);

 private:
  // Waits until all ranks are ready at once: one that was may have ended since, as when all are started again
  // behind a loss. The first error that ends the wait is a load error. A rank hangs that does not answer
  // after an epoch (`last_epoch`, or one that another rank tells, as to a new coordinator); a first load may
  // have its reasons to be slow.
  absl::Status WaitLoaded(uint64_t last_epoch, const std::function<bool()>& cancelled,
                          std::vector<v1::DescribeResponse>* described);
  void TakeIn(const std::vector<RankPoll::Heard>& heard);
  std::string Progress(const std::vector<RankPoll::Heard>& heard) const;
  void EndTheOthers(const std::vector<RankPoll::Heard>& heard);

  const RankLinks& links_;
  const int describe_timeout_ms_;
  const Listener listener_;
  std::vector<std::string> ended_;  // by rank: why it ended, as far as that is known; empty once it is ready
  SeldomLine progress_;
  SeldomLine joining_;
};

}  // namespace kdt
