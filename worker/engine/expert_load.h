// How evenly the router spreads rows over the experts of each layer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kdt {

class ExpertLoad {
 public:
  // `layer` names it in Count.
  void AddLayer(const void* layer, int64_t experts);

  // The experts that rows were sent to, each in 0 .. experts - 1, or -1 (none). A few nanoseconds each.
  void Count(const void* layer, std::span<const int32_t> expert_ids);

  // The busiest expert's rows over the mean expert's, averaged over the layers: 1 is even, the number of
  // experts the worst. Counts of the past fade, so that it follows the traffic. 0 before there is any.
  double Imbalance() const;

 private:
  struct Layer {
    const void* name;
    std::vector<uint64_t> rows;  // by expert
    uint64_t total = 0;
  };
  std::vector<Layer> layers_;
};

}  // namespace kdt
