// How far the drafter's probabilities can be believed: learnt per depth from what the target accepted.
//
// The drafter's path probabilities are its own opinion, formed without seeing the path; it is over-confident
// on hard text and deep in the block. For each depth d the model keeps the ratio of accepted tokens to the
// probability mass that the tree offered there (once the path had come so far), and predicts with p(path) x
// product of the ratios down to d.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "coordinator/ddtree/ddtree.h"

namespace kdt {

class AcceptanceModel {
 public:
  // A verified tree: its first `verified` drafted nodes took part; `accepted` are the node indices of the
  // accepted path in order (children of one another, from the root). `step` counts steps; long pauses make
  // old knowledge fade.
  void Observe(const Tree& tree, size_t verified, std::span<const uint32_t> accepted, uint64_t step);

  // Expected acceptances of each drafted node (index 0 is node 1), never above its parent's.
  void Gains(const Tree& tree, std::vector<double>* gains) const;

  // The ratio learnt for depth d >= 1 alone; 1 before anything is known.
  double Ratio(size_t depth) const;

 private:
  struct Depth {
    double offered = 2.0, accepted = 2.0;  // the drafter is believed until a few tokens say otherwise
    uint64_t last = 0;
  };
  std::vector<Depth> depths_;  // [depth - 1]
};

}  // namespace kdt
