// The one thread that runs a rank's engine, and the life of an epoch around it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "kdt/v1/worker.pb.h"
#include "worker/collective/collective.h"
#include "worker/engine/engine.h"

namespace kdt {

// Makes the collective of an epoch: id, rank, size, timeout. main.cc chooses the implementation by backend.
// Gives up soon after `*cancelled` has become true; it lives as long as the collective.
using CollectiveFactory = std::function<absl::StatusOr<std::unique_ptr<Collective>>(
    const v1::JoinGroupRequest& request, const std::atomic<bool>* cancelled)>;

// Called on the engine's thread behind every step, for metrics.
using StepListener = std::function<void(const v1::StepRequest& request, const v1::StepResponse& response)>;

class EngineThread {
 public:
  using JoinDone = std::function<void(absl::StatusOr<std::string> collective_name)>;
  using StepDone = std::function<void(v1::StepResponse response)>;

  EngineThread(int rank, int tp, CollectiveFactory factory, StepListener listener);
  // Aborts what runs, answers what waits with CANCELLED, and joins the thread.
  ~EngineThread();

  // Once, when the weights are loaded. JoinGroup is FAILED_PRECONDITION before.
  void SetEngine(std::unique_ptr<Engine> engine);

  // From any thread; `done` is called on the engine's thread (or at once when the request is refused). Ends
  // the epoch that runs, connects the collectives, tests them with one reduction, drops every sequence.
  void JoinGroup(const v1::JoinGroupRequest& request, JoinDone done);

  // From any thread, in the order of the stream. A request of another epoch, out of order, or behind an error
  // is answered with FAILED_PRECONDITION in error_code. Any error ends the epoch.
  void Step(v1::StepRequest request, StepDone done);

  // Ends `epoch` if it is the one that runs: wakes the engine from any collective. From any thread.
  void EndEpoch(uint64_t epoch);

  // Calls `done` with the number of steps since start once everything queued before is finished. A join in
  // progress is given up.
  void Drain(std::function<void(uint64_t steps)> done);

  // Fills the engine's part of the answer; false while the weights are not loaded.
  bool Describe(v1::DescribeResponse* response) const;
  uint64_t epoch() const;

 private:
  void Run();
  void Post(std::function<void()> task);
  using CancelFlag = std::shared_ptr<std::atomic<bool>>;
  absl::StatusOr<std::string> Join(const v1::JoinGroupRequest& request, const CancelFlag& cancelled);
  void CancelJoin();  // under the mutex
  void RunStep(const v1::StepRequest& request, int64_t received_ns, v1::StepResponse* response);
  absl::Status CheckStep(const v1::StepRequest& request) const;

  const int rank_;
  const int tp_;
  const CollectiveFactory factory_;
  const StepListener listener_;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  bool stop_ = false;
  std::unique_ptr<Engine> engine_;   // set once; then used by the engine's thread alone (Describe is const)
  CancelFlag joining_;               // of the join that is queued or in progress
  CancelFlag collective_cancelled_;  // the flag that collective_ was made with
  std::unique_ptr<Collective>
      collective_;  // replaced by the engine's thread under the mutex, aborted from any
  uint64_t epoch_ = 0;
  bool epoch_over_ = true;
  uint64_t last_step_ = 0;  // of the epoch
  uint64_t steps_ = 0;      // since start

  std::thread thread_;
};

}  // namespace kdt
