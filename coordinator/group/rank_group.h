// The group over gRPC: one step stream a rank, digests compared one step behind (docs/architecture.md,
// "A step" and "When something dies").
#pragma once

#include <grpcpp/completion_queue.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "coordinator/group/epoch_progress.h"
#include "coordinator/group/group.h"
#include "coordinator/group/group_forming.h"
#include "coordinator/group/rank_link.h"
#include "kdt/v1/worker.pb.h"

namespace kdt {

struct RankGroupOptions {
  std::vector<std::string> addresses;  // by rank: HOST:PORT or unix:PATH
  RankSecurity security;
  int step_timeout_ms = 30'000;
  FormingTimes forming;
  std::function<void()> on_change;  // called from any thread after state() has changed; must not block
};

class RankGroup : public Group {
 public:
  explicit RankGroup(RankGroupOptions options);
  ~RankGroup() override;

  void Form() override;
  GroupState state() const override;
  std::string reason() const override;
  uint64_t epoch() const override;
  GroupLimits limits() const override;
  std::vector<RankStatus> Ranks() const override;
  absl::Status Send(v1::StepRequest* request) override;
  absl::Status Receive(v1::StepResponse* response) override;
  absl::Status Poll() override;
  StepCost last_cost() const override { return cost_; }
  void Reject(const std::string& what) override;
  void Abandon() override { stopping_ = true; }

  // False once a rank is known to be gone while the group does not serve: what waits for the group may wait
  // in vain. From any thread.
  bool MayServeSoon() const;
  // Tells every worker that listens to end after its current step. Only behind the last Send, Receive and
  // Poll; the group is kDown afterwards.
  void DrainWorkers();

 private:
  void RunForming();
  void SetState(GroupState state, const std::string& reason);
  // Nothing more is to be had from the epoch.
  bool over() const { return progress_.failed() || stopping_; }
  // Handles one event of a queue if one comes before `deadline_us` (MonotonicMicros). False: none came.
  bool PumpOne(grpc::CompletionQueue* queue, int64_t deadline_us);
  bool PumpAny(int64_t deadline_us);
  void DrainPeers();
  void OnAnswer(RankLink* link);
  void UpdateStatus(uint32_t rank, const v1::StepResponse& response);
  void OnStreamEnded(const RankLink& link);
  // Ends the epoch: closes the streams, sets kDown. The reason names the rank that caused a failure.
  absl::Status EndEpoch();
  std::string Blame();
  void CloseStreams();

  const RankGroupOptions options_;
  RankLinks links_;
  // Rank 0's answers have a queue of their own, so that those of the others, which may wait until the next
  // step is on its way, are never handled in front of them.
  grpc::CompletionQueue queue_;
  grpc::CompletionQueue peers_queue_;

  mutable std::mutex mutex_;  // guards the next seven
  GroupState state_ = GroupState::kDown;
  std::string reason_ = "the group has not formed yet";
  uint64_t epoch_ = 0;
  GroupLimits limits_;
  std::vector<RankStatus> status_;
  std::vector<bool> gone_;  // by rank, as far as it has been asked since the group served last
  int64_t formed_us_ = 0;

  GroupForming former_;                                 // the forming thread only
  static constexpr int64_t kFailureLineUs = 2'000'000;  // between two log lines on why it did not form
  SeldomLine did_not_form_{kFailureLineUs};
  std::thread forming_;
  std::atomic<bool> stopping_{false};

  // The scheduler's thread only.
  EpochProgress progress_;
  int64_t sent_us_ = 0;
  v1::StepResponse rank0_;    // its last answer
  v1::StepResponse scratch_;  // of the others
  StepCost cost_;
};

}  // namespace kdt
