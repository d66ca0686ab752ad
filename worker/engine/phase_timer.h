// Where a step's time goes. On a GPU ops are queued, so the phases inside the forward measure the queueing.
#pragma once

#include <chrono>
#include <cstdint>

namespace kdt {

struct PhaseTimes {
  int64_t forward_ns = 0;  // the target's forward, attention, moe and dense below included
  int64_t attention_ns = 0;  // behind its first projection, which goes with the sum in front of it
  int64_t moe_ns = 0;    // router and shared experts included
  int64_t dense_ns = 0;  // layers without experts
  int64_t draft_ns = 0;
  int64_t sample_ns = 0;
};

// Adds the time from construction to destruction.
class PhaseTimer {
 public:
  explicit PhaseTimer(int64_t* total) : total_(total), start_(std::chrono::steady_clock::now()) {}
  ~PhaseTimer() {
    *total_ += std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start_)
                   .count();
  }
  PhaseTimer(const PhaseTimer&) = delete;
  PhaseTimer& operator=(const PhaseTimer&) = delete;

 private:
  int64_t* total_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace kdt
