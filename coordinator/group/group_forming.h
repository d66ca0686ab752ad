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
#include "coordinator/group/seldom_line.h"

namespace kdt {

struct FormedGroup {
  uint64_t epoch = 0;
  GroupLimits limits;
  std::vector<v1::DescribeResponse> ranks;  // by rank
};

struct FormingTimes {
  int describe_ms = 5'000;  // a rank that does not tell of itself for so long is silent
  int join_ms = 60'000;     // for a join, the ranks' own time-out
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

  // `links` outlives this.
  GroupForming(const RankLinks& links, FormingTimes times, Listener listener);

  // Blocks; polls as long as ranks are loading. `cancelled` is asked between polls (CANCELLED). Errors name
  // the rank. The epoch is larger than `last_epoch` and than any that a rank has told. Of a rank that hangs
  // whoever watches the processes is told, so that all are started again.
  absl::StatusOr<FormedGroup> Form(uint64_t last_epoch, const std::function<bool()>& cancelled);

 private:
  // Waits until all ranks are ready at once: one that was may have ended since, as when all are started again
  // behind a loss. The first error that ends the wait is a load error.
  absl::Status WaitLoaded(RankPoll* poll, uint64_t last_epoch, const std::function<bool()>& cancelled,
                          std::vector<v1::DescribeResponse>* described);
  // Joins the ranks in an epoch. A rank may hang since it told that it is ready: `poll` finds that before the
  // join's time is over.
  absl::Status JoinAll(RankPoll* poll, uint64_t epoch, const std::function<bool()>& cancelled);
  void TakeIn(const std::vector<RankPoll::Heard>& heard);
  std::string Progress(const std::vector<RankPoll::Heard>& heard) const;
  // By rank. Calls in a row without an answer from one who listens.
  std::vector<bool> Silent(const std::vector<RankPoll::Heard>& heard, int silences) const;
  // Has all ranks started again. Returns who hangs: "rank 1, rank 2 hang".
  std::string RestartAround(const std::vector<bool>& hung, const std::vector<RankPoll::Heard>& heard,
                            int unanswered_ms);

  const RankLinks& links_;
  const FormingTimes times_;
  const Listener listener_;
  std::vector<std::string> ended_;  // by rank: why it ended, as far as that is known; empty once it is ready
  SeldomLine progress_;
  SeldomLine joining_;
};

}  // namespace kdt
