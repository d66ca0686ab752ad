// A client for scheduler tests: keeps what a request's sink was told.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/scheduler/request.h"

namespace kdt::testing {

class Collector : public RequestSink {
 public:
  struct Sample {
    std::vector<uint32_t> tokens;
    std::string text;
    std::vector<v1::PositionLogprobs> logprobs;
    std::optional<v1::Complete> complete;
    bool late = false;  // something came behind Complete
  };

  bool Push(v1::GenerateResponse&& response) override {
    std::lock_guard lock(mutex_);
    if (refuse_) return false;
    Sample& sample = samples_[response.index()];
    sample.late = sample.late || sample.complete.has_value() || ended_.has_value();
    if (response.has_complete()) {
      sample.complete = response.complete();
    } else {
      const v1::Chunk& chunk = response.chunk();
      sample.tokens.insert(sample.tokens.end(), chunk.token_ids().begin(), chunk.token_ids().end());
      sample.logprobs.insert(sample.logprobs.end(), chunk.logprobs().begin(), chunk.logprobs().end());
      sample.text += chunk.text();
    }
    changed_.notify_all();
    return true;
  }
  void End(const absl::Status& status) override {
    std::lock_guard lock(mutex_);
    twice_ = twice_ || ended_.has_value();
    ended_ = status;
    changed_.notify_all();
  }

  void RefuseMore() {
    std::lock_guard lock(mutex_);
    refuse_ = true;
  }
  // The final status; DEADLINE_EXCEEDED when it does not come.
  absl::Status Wait() {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::seconds(20), [this] { return ended_.has_value(); })) {
      return absl::DeadlineExceededError("no end came");
    }
    return *ended_;
  }
  bool WaitTokens(uint32_t index, size_t count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(20),
                             [&] { return samples_[index].tokens.size() >= count || ended_.has_value(); });
  }
  Sample sample(uint32_t index = 0) {
    std::lock_guard lock(mutex_);
    return samples_[index];
  }
  bool ended_twice() {
    std::lock_guard lock(mutex_);
    return twice_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint32_t, Sample> samples_;
  std::optional<absl::Status> ended_;
  bool refuse_ = false;
  bool twice_ = false;
};

}  // namespace kdt::testing
