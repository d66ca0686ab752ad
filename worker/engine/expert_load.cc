#include "worker/engine/expert_load.h"

#include <algorithm>

namespace kdt {
namespace {

// Rows an expert has on average when the counts are halved: enough that chance alone moves the ratio little.
constexpr uint64_t kRowsAnExpert = 256;
// Distinct experts a rank on average, over steps and layers, when the sums of RankImbalance are halved.
constexpr double kExpertsARank = 1e5;

}  // namespace

void ExpertLoad::AddLayer(const void* layer, int64_t experts) {
  layers_.push_back({layer, std::vector<uint64_t>(static_cast<size_t>(experts))});
}

void ExpertLoad::Count(const void* layer, std::span<const int32_t> expert_ids) {
  const auto found = std::find_if(layers_.begin(), layers_.end(),
                                  [layer](const Layer& known) { return known.name == layer; });
  if (found == layers_.end()) return;
  const size_t experts = found->rows.size();
  seen_.assign(experts, 0);
  std::fill(on_rank_.begin(), on_rank_.end(), 0);
  int64_t distinct = 0;
  for (const int32_t expert : expert_ids) {
    if (expert < 0) continue;  // padding
    const auto e = static_cast<size_t>(expert);
    found->most = std::max(found->most, ++found->rows[e]);
    ++found->total;
    if (seen_[e] != 0) continue;
    seen_[e] = 1;
    ++on_rank_[e * on_rank_.size() / experts];
    ++distinct;
  }
  busiest_ += static_cast<double>(*std::max_element(on_rank_.begin(), on_rank_.end()));
  mean_ += static_cast<double>(distinct) / static_cast<double>(on_rank_.size());
  if (mean_ > kExpertsARank) {
    mean_ /= 2;
    busiest_ /= 2;
  }
  if (found->total < kRowsAnExpert * found->rows.size()) return;
  found->total = 0;
  for (uint64_t& rows : found->rows) found->total += rows /= 2;
  found->most /= 2;
}

double ExpertLoad::Imbalance() const {
  double sum = 0;
  int layers = 0;
  for (const Layer& layer : layers_) {
    if (layer.total == 0) continue;
    sum += static_cast<double>(layer.most) * static_cast<double>(layer.rows.size()) /
           static_cast<double>(layer.total);
    ++layers;
  }
  return layers == 0 ? 0 : sum / layers;
}

}  // namespace kdt
