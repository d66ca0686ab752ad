// The calls that join all ranks in an epoch, at the same time.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "coordinator/group/rank_link.h"

namespace kdt {

// How much longer a call waits than the rank itself, whose time-out names its peer.
constexpr int kJoinGraceMs = 5'000;

class JoinCalls {
 public:
  // Starts them. `request` holds all but the rank.
  JoinCalls(const RankLinks& links, const v1::JoinGroupRequest& request);
  ~JoinCalls();  // gives up those under way
  JoinCalls(const JoinCalls&) = delete;
  JoinCalls& operator=(const JoinCalls&) = delete;

  // Until all have ended, one has failed by itself (the others would wait in vain), or `given_up` says so.
  void Wait(const std::function<bool()>& given_up);
  // OK while none has failed. `rank` is whose error this is.
  absl::Status failure(size_t* rank) const;
  bool all_ended() const;
  // By rank: who let the call's time pass, which lies behind that of its own time-out.
  std::vector<bool> unanswered() const;

 private:
  void Call(RankLink* link, v1::JoinGroupRequest request);

  std::vector<std::unique_ptr<grpc::ClientContext>> contexts_;
  mutable std::mutex mutex_;  // guards the next five
  std::condition_variable changed_;
  size_t ended_ = 0;
  absl::Status failure_;  // the first; one of a rank by itself says more than that of one which waited for it
  size_t failed_ = 0;
  std::vector<bool> unanswered_;
  std::vector<std::thread> threads_;
};

}  // namespace kdt
