// How evenly the router spreads rows over the experts of each layer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kdt {

class ExpertLoad {
 public:
  // `ranks` hold equal ranges of the experts, in order.
  explicit ExpertLoad(int64_t ranks = 1) : on_rank_(static_cast<size_t>(ranks)) {}

  // `layer` names it in Count.
  void AddLayer(const void* layer, int64_t experts);

  // The experts that a step's rows were sent to, each in 0 .. experts - 1, or -1 (none). A few nanoseconds
  // each.
  void Count(const void* layer, std::span<const int32_t> expert_ids);

  // The busiest expert's rows over the mean expert's, averaged over the layers: 1 is even, the number of
  // experts the worst. Counts of the past fade, so that it follows the traffic. 0 before there is any.
  double Imbalance() const;

  // Distinct experts of a step on the rank that has most of them over the mean rank's: how much longer than
  // the mean the busiest rank reads weights. Mean of layers and steps, fading. 0 before there is any.
  double RankImbalance() const { return mean_ == 0 ? 0 : busiest_ / mean_; }

 private:
  struct Layer {
    const void* name;
    std::vector<uint64_t> rows;    // by expert
    uint64_t total = 0, most = 0;  // of them
  };
  std::vector<Layer> layers_;
  std::vector<int64_t> on_rank_;  // scratch: distinct experts
  std::vector<uint8_t> seen_;     // scratch: by expert
  double busiest_ = 0, mean_ = 0;
};

}  // namespace kdt
