// Steps of an engine with random weights over sequences of any length, timed.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kdt/v1/worker.pb.h"
#include "tests/bench/rank_bench/expert_tap.h"
#include "tests/bench/rank_bench/part_clock.h"
#include "tests/bench/rank_bench/ranks.h"
#include "worker/engine/engine.h"

namespace kdt::bench {

struct StepShape {
  int64_t rows = 1;  // nodes of each sequence's tree
  int64_t batch = 1;
  int64_t context = 4096;
  bool draft = false;
  int64_t token_begin = 0, token_end = 1;  // tokens are drawn from these
};

struct StepTimes {
  double wall_us = 0;     // of a call of Step, median
  double fastest_us = 0;  // of all
  double slowest_us = 0;
  double graphs_us = 0;  // of the device in the graphs of a step, median; the rest is the host's
  std::vector<PartClock::GraphTime> graphs;         // of the step with that median, in order
  v1::StepTimings timings;                          // of the median step
  double expert_imbalance = 0, rank_imbalance = 0;  // as StepResponse
};

struct StepParts {
  std::array<double, kParts> us{};  // medians
  double experts = 0;               // distinct ones a layer, mean
};

class StepBench {
 public:
  // Everything outlives the object; the engine is at the start of an epoch. `told`: null where the other
  // ranks are not there.
  StepBench(Engine* engine, PartClock* clock, ExpertTap* tap, int rank, Told* told)
      : engine_(engine), clock_(clock), tap_(tap), rank_(rank), told_(told) {}

  // Medians of `steps` steps after `warm_up`.
  absl::StatusOr<StepTimes> Measure(const StepShape& shape, int warm_up, int steps);
  // The clock is on.
  absl::StatusOr<StepParts> MeasureParts(const StepShape& shape, int warm_up, int steps);
  // The engine has begun a new epoch.
  void Restart() { step_ = first_id_ = last_id_ = 0; }

 private:
  absl::Status Begin(const StepShape& shape);
  absl::Status Step(const StepShape& shape);

  Engine* engine_;
  PartClock* clock_;
  ExpertTap* tap_;
  int rank_;
  Told* told_;
  uint64_t step_ = 0;
  uint64_t tellings_ = 0;
  uint64_t first_id_ = 0, last_id_ = 0;  // sequences alive: [first, last)
  std::vector<uint32_t> starts_;
  uint32_t random_ = 1;
  v1::StepResponse response_;
};

}  // namespace kdt::bench
