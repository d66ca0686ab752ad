// Where a step's time goes. On a GPU ops are queued, so the phases inside the forward measure the queueing.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "worker/collective/collective.h"

namespace kdt {

struct PhaseTimes {
  int64_t forward_ns = 0;    // the target's forward, attention, moe and dense below included
  int64_t attention_ns = 0;  // behind its first projection, which goes with the sum in front of it
  int64_t moe_ns = 0;        // router and shared experts included
  int64_t dense_ns = 0;      // layers without experts
  int64_t draft_ns = 0;
  int64_t sample_ns = 0;
};

// Adds the time from construction to destruction, less what `collective`, if given, waits for other ranks in
// it: a step's phases do not overlap, and waiting is one of them. Where ops are queued, waiting is told when
// kernels of any time before get to it, so there may be more of it than time has passed: then nothing is
// added.
class PhaseTimer {
 public:
  explicit PhaseTimer(int64_t* total, const Collective* collective = nullptr)
      : total_(total),
        collective_(collective),
        waited_ns_(Waited()),
        start_(std::chrono::steady_clock::now()) {}
  ~PhaseTimer() {
    const int64_t passed_ns =
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start_)
            .count();
    *total_ += std::max<int64_t>(0, passed_ns - (Waited() - waited_ns_));
  }
  PhaseTimer(const PhaseTimer&) = delete;
  PhaseTimer& operator=(const PhaseTimer&) = delete;

 private:
  int64_t Waited() const { return collective_ == nullptr ? 0 : collective_->wait_ns(); }

  int64_t* total_;
  const Collective* collective_;
  const int64_t waited_ns_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace kdt
