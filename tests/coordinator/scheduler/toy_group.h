// A group in this process: one ToyRank behind the Group interface, with faults on demand.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "tests/coordinator/scheduler/toy_rank.h"

namespace kdt::testing {

class ToyGroup : public Group {
 public:
  explicit ToyGroup(ToyOptions options) : rank_(options), limits_(options.Limits()) {}

  // Called with each step before it is computed, on the scheduler's thread; an error ends the epoch.
  std::function<absl::Status(const v1::StepRequest&)> on_step;
  // May change an answer.
  std::function<void(v1::StepResponse*)> on_answer;
  std::function<void()> on_change;
  // How long a step takes; long enough for a test to act while a request runs.
  std::chrono::microseconds step_time{0};
  std::atomic<bool> forms{true};  // false: the ranks are not back yet
  RankStatus status;              // set before the start

  ToyRank& rank() { return rank_; }
  uint64_t steps() const { return steps_; }
  std::string step_error() const {
    std::lock_guard lock(mutex_);
    return step_error_;
  }

  void Form() override {
    if (!forms) return;
    rank_.StartEpoch();
    step_ = 0;
    ++epoch_;
    state_ = GroupState::kServing;
    if (on_change) on_change();
  }
  GroupState state() const override { return state_; }
  std::string reason() const override { return "toy"; }
  uint64_t epoch() const override { return epoch_; }
  GroupLimits limits() const override { return limits_; }
  std::vector<RankStatus> Ranks() const override { return {status}; }
  StepCost last_cost() const override { return {}; }
  absl::Status Poll() override { return absl::OkStatus(); }
  void Reject(const std::string&) override { state_ = GroupState::kDown; }
  void Abandon() override {}  // no step lasts

  absl::Status Send(v1::StepRequest* request) override {
    request->set_epoch(epoch_);
    request->set_step(++step_);
    sent_ = *request;
    return absl::OkStatus();
  }
  absl::Status Receive(v1::StepResponse* response) override {
    ++steps_;
    std::this_thread::sleep_for(step_time);
    absl::Status status = on_step ? on_step(sent_) : absl::OkStatus();
    if (status.ok()) {
      status = rank_.Step(sent_, response);
      std::lock_guard lock(mutex_);
      if (!status.ok()) step_error_ = std::string(status.message());
    }
    if (!status.ok()) state_ = GroupState::kDown;
    if (status.ok() && on_answer) on_answer(response);
    return status;
  }

 private:
  ToyRank rank_;
  const GroupLimits limits_;
  std::atomic<GroupState> state_{GroupState::kDown};
  std::atomic<uint64_t> epoch_{0};
  std::atomic<uint64_t> steps_{0};
  uint64_t step_ = 0;
  v1::StepRequest sent_;
  mutable std::mutex mutex_;
  std::string step_error_;  // a step that the rank had to refuse: a fault of the scheduler
};

}  // namespace kdt::testing
