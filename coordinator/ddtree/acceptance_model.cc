#include "coordinator/ddtree/acceptance_model.h"

#include <algorithm>
#include <cmath>

namespace kdt {
namespace {

constexpr double kKeep = 1.0 - 1.0 / 200.0;  // a depth's ratio follows its last 200 trees or so
constexpr double kPriorMass = 2.0;        // the drafter is believed until about so many tokens say otherwise
constexpr double kHalfLifeSteps = 200.0;  // after a pause in drafting the text has probably changed
constexpr uint64_t kPauseSteps = 50;
constexpr double kMinRatio = 0.01, kMaxRatio = 4.0;

}  // namespace

void AcceptanceModel::Observe(const Tree& tree, size_t verified, std::span<const uint32_t> accepted,
                              uint64_t step) {
  const size_t end = std::min(verified + 1, tree.size());
  uint32_t at = 0;
  for (size_t depth = 1;; ++depth) {
    double offered = 0.0;
    for (size_t node = at + 1; node < end; ++node) {
      if (tree.parents[node] == static_cast<int32_t>(at))
        offered += std::exp(tree.log_probs[node] - tree.log_probs[at]);
    }
    if (offered == 0.0) return;
    if (depths_.size() < depth) depths_.resize(depth);
    Depth& here = depths_[depth - 1];
    double keep = kKeep;
    if (step > here.last + kPauseSteps)
      keep *= std::exp2(-static_cast<double>(step - here.last) / kHalfLifeSteps);
    const bool hit = depth <= accepted.size() && accepted[depth - 1] < end;
    here.offered = here.offered * keep + std::min(offered, 1.0);
    here.accepted = here.accepted * keep + (hit ? 1.0 : 0.0);
    here.last = step;
    if (!hit) return;
    at = accepted[depth - 1];
  }
}

double AcceptanceModel::Ratio(size_t depth) const {
  if (depth == 0 || depth > depths_.size()) return 1.0;
  const Depth& here = depths_[depth - 1];
  return std::clamp(here.accepted / here.offered, kMinRatio, kMaxRatio);
}

void AcceptanceModel::Gains(const Tree& tree, std::vector<double>* gains) const {
  gains->resize(tree.drafted());
  double factor[256];
  const size_t known = std::min<size_t>(depths_.size(), 255);
  factor[0] = 1.0;
  for (size_t depth = 1; depth <= known; ++depth) factor[depth] = factor[depth - 1] * Ratio(depth);
  for (size_t node = 1; node < tree.size(); ++node) {
    const double calibrated =
        std::exp(tree.log_probs[node]) * factor[std::min<size_t>(tree.depths[node], known)];
    const int32_t parent = tree.parents[node];
    (*gains)[node - 1] = std::min(calibrated, parent == 0 ? 1.0 : (*gains)[static_cast<size_t>(parent) - 1]);
  }
}

}  // namespace kdt
