// The loop that drives the group: takes requests, composes steps, hands answers to clients.
//
// One thread does all of it. Between rank 0's answer and the next step it only does what that step needs
// (tokens, stops by id, trees); texts are made while the ranks compute. A stop string therefore costs one
// more step of its sample, whose tokens nobody sees.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/group/group.h"
#include "coordinator/scheduler/metrics.h"
#include "coordinator/scheduler/output_stream.h"
#include "coordinator/scheduler/request.h"
#include "coordinator/scheduler/sample.h"
#include "coordinator/scheduler/sequence_store.h"
#include "coordinator/scheduler/speculator.h"
#include "coordinator/scheduler/step_builder.h"
#include "coordinator/scheduler/step_results.h"

namespace kdt {

// What clients are told when no group will go on with their requests.
constexpr char kGroupLost[] = "the model group was lost";

struct SchedulerOptions {
  uint32_t vocab_size = 0;
  uint32_t max_waiting = 256;  // requests; more are refused
  uint32_t max_running = 64;   // samples
  SpeculationOptions speculation;
  uint32_t prefill_chunk = 512;                    // prompt tokens of one sample a step
  std::shared_ptr<prometheus::Registry> registry;  // for the metrics; null: nobody reads them
  // When the group is lost: form it again and go on with every request, or end them all with UNAVAILABLE.
  bool rejoin = false;
  // Called once from the scheduler's thread when the group is lost for good (never with `rejoin`).
  std::function<void(const std::string& reason)> on_group_lost;
};

class Scheduler {
 public:
  // `group` outlives the scheduler; call Wake() when its state changes.
  Scheduler(SchedulerOptions options, Group* group, TextTools tools);
  ~Scheduler() { Stop(); }

  void Start();
  // Ends the thread, soon also when a rank hangs; whatever runs is ended with `why`.
  void Stop(const absl::Status& why = absl::UnavailableError("the server is shutting down"));

  // Takes a request; the sink hears of it from the scheduler's thread. Returns its id for Cancel.
  // RESOURCE_EXHAUSTED: the queue is full; UNAVAILABLE: the group does not serve or the server is draining.
  absl::StatusOr<uint64_t> Submit(RequestSpec spec, std::shared_ptr<RequestSink> sink);
  // Ends the request with `status` and frees its slots with the next step. Unknown ids are ignored: it may
  // have ended.
  void Cancel(uint64_t id, absl::Status status);
  void Wake();

  // No more requests are taken; true once none is left, false after `timeout`.
  bool Drain(std::chrono::milliseconds timeout);

  CoordinatorMetrics& metrics() { return metrics_; }
  uint32_t running() const { return running_count_; }
  uint32_t held() const { return held_count_; }
  uint32_t waiting() const { return waiting_count_; }

 private:
  struct Cancellation {
    uint64_t id;
    absl::Status status;
  };

  // scheduler_loop.cc; this and the next on the scheduler's thread.
  void Run();
  bool TakeCommands();  // false: the scheduler is to end
  bool stopping() const;
  uint32_t DraftDepths() const;
  bool GroupServes();
  void LoseGroup();
  void Accept(std::unique_ptr<Request> request);
  void Admit();
  bool HasRoomFor(const Sample& sample, const std::vector<LiveSequence>& live) const;
  bool MayStart(const Sample& sample) const;
  void StartSample(Sample* sample, const std::vector<LiveSequence>& live);
  std::vector<LiveSequence> Live() const;
  void Enqueue(Sample* sample);
  void RunStep();
  void CountPool(int64_t now_us);
  void CheckSlotCount();
  void Reap();
  void UpdateCounts();
  void WaitForWork();

  // scheduler_answers.cc
  void DeliverGains();
  void Deliver(Gained* gained);
  void Complete(Sample* sample, const Gained& gained, const std::optional<std::string>& stop_string);
  void EndRequest(Request* request, const absl::Status& status);
  void EndAll(const absl::Status& status);

  const SchedulerOptions options_;
  Group* const group_;
  const TextTools tools_;
  CoordinatorMetrics metrics_;

  mutable std::mutex mutex_;  // guards the next eight
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Request>> inbox_;
  std::vector<Cancellation> cancellations_;
  bool woken_ = false;
  bool stop_ = false;
  bool ended_ = false;  // the thread
  absl::Status stop_why_;
  bool draining_ = false;
  size_t open_requests_ = 0;                // not ended
  std::atomic<uint32_t> running_count_{0};  // samples
  std::atomic<uint32_t> held_count_{0};     // samples that ran and wait: for the group, or for KV slots
  std::atomic<uint32_t> waiting_count_{0};  // requests of which no sample has started
  std::atomic<uint64_t> next_id_{1};
  std::thread thread_;

  // The scheduler's thread only.
  std::unordered_map<uint64_t, std::unique_ptr<Request>> requests_;
  std::vector<Sample*> waiting_;  // seniors first
  std::vector<Sample*> running_;  // seniors first
  SequenceStore store_;
  Speculator speculator_;
  int64_t slot_difference_ = 0;  // rank 0's KV slots in use less our own count, at the last step
  int64_t step_taken_us_ = 0;    // when the last step's answer was taken in; 0: the loop has been idle since
  StepBuilder builder_;
  v1::StepRequest step_;
  v1::StepResponse answer_;
  std::vector<PlanItem> plan_;
  std::vector<Sample*> preempted_;
  std::vector<Gained> gained_;  // of the last step, not delivered yet
  GroupLimits limits_;
  uint64_t epoch_ = 0;  // of the group that store_ mirrors; 0: none
  bool lost_ = false;   // for good
  int64_t last_sent_us_ = 0;
  int64_t retry_forming_us_ = 0;
  int64_t pool_counted_us_ = 0;
};

}  // namespace kdt
