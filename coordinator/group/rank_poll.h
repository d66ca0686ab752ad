// Asks every rank again and again who it is, all at the same time: one that hangs delays nobody else's
// answer.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "coordinator/group/rank_link.h"

namespace kdt {

constexpr int kRankPollMs = 50;

class RankPoll {
 public:
  // The last that was heard of one rank.
  struct Heard {
    bool asked = false;  // a call has ended, with an answer or without
    bool answered = false;
    v1::DescribeResponse description;  // empty unless it answered
    int silences = 0;                  // calls in a row that ended without an answer from one who listens
    bool ready() const { return answered && description.ready(); }
    // It has ended, or is about to.
    bool gone() const { return asked && (!answered || !description.load_error().empty()); }
  };

  // A rank that gives no answer for `timeout_ms` is silent.
  RankPoll(const RankLinks& links, int timeout_ms);
  ~RankPoll();  // gives up the calls under way
  RankPoll(const RankPoll&) = delete;
  RankPoll& operator=(const RankPoll&) = delete;

  std::vector<Heard> heard() const;  // by rank
  void ForgetSilences();

 private:
  void Ask(size_t rank);

  const RankLinks& links_;
  const int timeout_ms_;
  mutable std::mutex mutex_;  // guards the next four
  std::condition_variable ended_;
  bool end_ = false;
  std::vector<Heard> heard_;
  std::vector<grpc::ClientContext*> calls_;  // under way, by rank; null: none
  std::vector<std::thread> threads_;
};

}  // namespace kdt
