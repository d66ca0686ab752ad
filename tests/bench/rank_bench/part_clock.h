// Device time of a step by part: an event wherever the work changes from one part to another, also inside
// captured graphs.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kdt::bench {

enum class Part { kAttention, kAbsorb, kMoe, kRouter, kGemm, kSmall, kCollective, kSampling, kDraft, kNone };
inline constexpr int kParts = static_cast<int>(Part::kNone);
const char* PartName(Part part);

class PartClock {
 public:
  explicit PartClock(cudaStream_t stream) : stream_(stream) {}
  ~PartClock();
  PartClock(const PartClock&) = delete;
  PartClock& operator=(const PartClock&) = delete;

  // Off (at first): Enter does nothing.
  void Enable(bool enabled) { enabled_ = enabled; }
  bool enabled() const { return enabled_; }
  cudaStream_t stream() const { return stream_; }
  // The ops from now on belong to `part`; kNone: to none.
  absl::Status Enter(Part part);

  // The marks of what is recorded between the two calls belong to a graph, not to the step. A graph with
  // drafter's attention is the drafter's as a whole.
  void BeginGraph();
  std::vector<std::pair<Part, cudaEvent_t>> EndGraph();
  // A graph with these marks runs as a part of the step. `marks` lives until the step's Collect.
  void Replay(const std::vector<std::pair<Part, cudaEvent_t>>* marks);

  // Device time of graphs as a whole, while on: around every replay, which returns the replay's status.
  void TimeGraphs(bool on) { time_graphs_ = on; }
  absl::Status Around(absl::FunctionRef<absl::Status()> replay);
  struct GraphTime {
    double device_us = 0;
    double launch_us = 0;  // of the host, in the call that queues it
  };
  // Of all replays since the last call, in order; the device has finished.
  absl::StatusOr<std::vector<GraphTime>> CollectGraphs();

  // Of a step: what comes behind its sampling is the drafter's.
  void BeginStep() { sampled_ = drafting_ = false; }

  // Microseconds of each part since the last call; the device has finished.
  absl::Status Collect(std::array<double, kParts>* microseconds);

 private:
  using Marks = std::vector<std::pair<Part, cudaEvent_t>>;
  absl::Status Mark(Part part);
  absl::StatusOr<cudaEvent_t> Event(bool reusable);

  cudaStream_t stream_;
  bool enabled_ = false;
  bool time_graphs_ = false;
  bool capturing_ = false;
  bool sampled_ = false, drafting_ = false;  // outside of graphs
  Part current_ = Part::kNone;
  Marks step_, graph_;
  struct Replayed {
    cudaEvent_t begin, end;
    double launch_us;
  };
  std::vector<Replayed> replays_;
  std::vector<const Marks*> sequence_;  // graphs of the step in order
  std::vector<cudaEvent_t> spare_, all_;
};

}  // namespace kdt::bench
