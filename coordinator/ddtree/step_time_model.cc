#include "coordinator/ddtree/step_time_model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>

namespace kdt {
namespace {

constexpr size_t kKnots = kRowKnots.size();
constexpr double kWindow = 16.0;         // a mean follows its last 16 values or so
constexpr double kClip = 2.0;            // one stalled step must not count for more than this times the mean
constexpr double kSurpriseRatio = 1.25;  // a value this far off the mean ...
constexpr double kHalfLifeSteps = 2000.0;  // knowledge that is not renewed fades
constexpr double kKnownFreshness = 0.25;
constexpr double kKnownWeight = 1.5;
constexpr double kInheritedWeight = 1.0;  // of a neighbouring bucket's mean in a new bucket
constexpr double kNeverSeenMicros = 1000.0;
constexpr double kDraftShare = 0.1;
constexpr double kEstablishedWeight = 6.0;  // a mean of fewer values is still settling when it moves
// A changed machine makes what was seen elsewhere on the curve doubtful: moved along and counted as one
// value, or, when the change is large and so the curve's shape is surely another, forgotten.
constexpr double kDoubtfulWeight = 1.0;
constexpr double kLargeChange = 1.5;

// The cautious prior's shape, t(rows) / t(1): what a Kimi-K2 rank reads for so many tokens (6.7 GB for one,
// 26 for 16, 40 for 32; routed experts dominate).
double PriorShape(double rows) { return 1.0 + 0.32 * std::pow(rows - 1.0, 0.8); }

// log2 buckets: 0, 1, 2, 3-4, 5-8, ...
int Log2Bucket(uint64_t value) { return value <= 1 ? 0 : static_cast<int>(std::bit_width(value - 1)); }

// Piecewise linear through the points; beyond the last in proportion to the row count, before the first
// constant.
double Interpolate(const std::array<double, kKnots>& x, const std::array<double, kKnots>& y, double rows) {
  const auto above = std::lower_bound(x.begin(), x.end(), rows);
  if (above == x.end()) return y.back() * rows / x.back();
  const size_t i = static_cast<size_t>(above - x.begin());
  if (i == 0) return y[0];
  return y[i - 1] + (rows - x[i - 1]) / (x[i] - x[i - 1]) * (y[i] - y[i - 1]);
}

}  // namespace

double RowCurve::Micros(uint32_t rows) const { return Interpolate(rows_, micros_, rows) + extra_; }
double RowCurve::OptimisticMicros(uint32_t rows) const {
  return Interpolate(rows_, optimistic_, rows) + extra_;
}
bool RowCurve::Known(uint32_t rows) const { return known_[StepTimeModel::NearestKnot(rows)]; }

size_t StepTimeModel::NearestKnot(uint32_t rows) {
  const auto above = std::lower_bound(kRowKnots.begin(), kRowKnots.end(), std::max(rows, 1u));
  if (above == kRowKnots.end()) return kKnots - 1;
  const size_t i = static_cast<size_t>(above - kRowKnots.begin());
  if (i == 0) return 0;
  const double r = rows;
  return r * r < static_cast<double>(kRowKnots[i - 1]) * kRowKnots[i] ? i - 1 : i;
}

bool StepTimeModel::Mean::Add(double sample, uint64_t now) {
  last = now;
  if (weight == 0.0) {
    value = sample;
    weight = 1.0;
    return false;
  }
  const double ratio = sample / value;
  const int direction = ratio > kSurpriseRatio ? 1 : ratio < 1.0 / kSurpriseRatio ? -1 : 0;
  if (direction == 0 || direction * surprises < 0) surprises = 0;
  if (direction != 0) {
    surprising[static_cast<size_t>(std::abs(surprises))] = sample;
    surprises += direction;
  }
  if (std::abs(surprises) == static_cast<int>(surprising.size())) {
    // The median: one stalled step among them must not become the new mean.
    std::sort(surprising.begin(), surprising.end());
    value = 0.5 * (surprising[1] + surprising[2]);
    weight = static_cast<double>(surprising.size());
    surprises = 0;
    return true;
  }
  weight = std::min(weight + 1.0, kWindow);
  value += (std::clamp(sample, value / kClip, value * kClip) - value) / weight;
  return false;
}

double StepTimeModel::Mean::Freshness(uint64_t now) const {
  return weight == 0.0 ? 0.0 : std::exp2(-static_cast<double>(now - last) / kHalfLifeSteps);
}

StepTimeModel::Key StepTimeModel::KeyOf(const StepShape& shape) {
  return {Log2Bucket(shape.batch), Log2Bucket(shape.context_tokens / 1024)};
}

const StepTimeModel::Cell* StepTimeModel::Nearest(Key key) const {
  const Cell* best = nullptr;
  int best_distance = 0;
  for (const auto& [other, cell] : cells_) {
    const int distance = 2 * std::abs(other.first - key.first) + std::abs(other.second - key.second);
    if (best == nullptr || distance < best_distance) best = &cell, best_distance = distance;
  }
  return best;
}

StepTimeModel::Cell& StepTimeModel::Touch(Key key) {
  const auto it = cells_.find(key);
  if (it != cells_.end()) return it->second;
  Cell cell;
  if (const Cell* near = Nearest(key)) {
    cell = *near;
    for (Knot& knot : cell) knot.micros.weight = std::min(knot.micros.weight, kInheritedWeight);
  }
  return cells_.emplace(key, cell).first->second;
}

// Pool-adjacent-violators over the knots that were seen, straight lines between them, the prior's shape
// outside.
void StepTimeModel::Fit(const Cell& cell, RowCurve* curve) const {
  struct Block {
    double value, weight;
    size_t first, last;
  };
  std::array<Block, kKnots> blocks;
  size_t count = 0;
  for (size_t i = 0; i < kKnots; ++i) {
    const Knot& knot = cell[i];
    curve->rows_[i] = knot.seen() ? knot.rows : kRowKnots[i];
    if (!knot.seen()) continue;
    blocks[count++] = {knot.micros.value, knot.micros.weight * std::max(knot.micros.Freshness(now_), 1e-6), i,
                       i};
    while (count > 1 && blocks[count - 2].value > blocks[count - 1].value) {
      Block& a = blocks[count - 2];
      const Block& b = blocks[count - 1];
      a.value = (a.value * a.weight + b.value * b.weight) / (a.weight + b.weight);
      a.weight += b.weight;
      a.last = b.last;
      --count;
    }
  }
  const auto& rows = curve->rows_;
  for (size_t i = 0, block = 0; i < kKnots; ++i) {
    double& micros = curve->micros_[i];
    if (count == 0) {
      micros = kNeverSeenMicros * PriorShape(rows[i]);
      continue;
    }
    while (block + 1 < count && i >= blocks[block + 1].first) ++block;
    const Block& at = blocks[block];
    if (i < at.first) {
      micros = at.value * PriorShape(rows[i]) / PriorShape(rows[at.first]);
    } else if (i <= at.last) {
      micros = at.value;
    } else if (block + 1 == count) {
      micros = at.value * PriorShape(rows[i]) / PriorShape(rows[at.last]);
    } else {
      const Block& next = blocks[block + 1];
      micros =
          at.value + (rows[i] - rows[at.last]) / (rows[next.first] - rows[at.last]) * (next.value - at.value);
    }
  }
}

bool StepTimeModel::Observe(const StepShape& shape, bool drafted, double micros, double draft_micros) {
  ++now_;
  if (!std::isfinite(micros) || micros <= 0.0 || !std::isfinite(draft_micros) || draft_micros < 0.0)
    return false;
  if (shape.batch == 0 || shape.rows == 0) return false;
  const Key key = KeyOf(shape);
  // The drafter may take no time at all; a ratio needs something to divide.
  bool changed = draft_[drafted][key].Add(std::max(draft_micros, 1e-3), now_);
  if (shape.prefill_rows > 0) {
    StepShape alone = shape;
    alone.prefill_rows = 0;
    const double extra = std::max(micros - Curve(alone).Micros(shape.rows), 1e-3);
    prefill_row_.Add(extra / shape.prefill_rows, now_);
    return changed;
  }
  Cell& cell = Touch(key);
  Knot& knot = cell[NearestKnot(shape.rows)];
  const Mean before = knot.micros;
  const bool moved = knot.micros.Add(micros, now_);
  knot.rows += (shape.rows - knot.rows) / knot.micros.weight;
  if (moved && before.weight >= kEstablishedWeight) {
    changed = true;
    const double ratio = knot.micros.value / before.value;
    for (Knot& other : cell) {
      if (&other == &knot || !other.seen()) continue;
      if (ratio > kLargeChange || ratio < 1.0 / kLargeChange) {
        other = {};
        continue;
      }
      other.micros.value *= ratio;
      other.micros.weight = std::min(other.micros.weight, kDoubtfulWeight);
    }
  }
  return changed;
}

RowCurve StepTimeModel::Curve(const StepShape& shape) const {
  RowCurve curve;
  static const Cell kEmpty{};
  const Key key = KeyOf(shape);
  const auto it = cells_.find(key);
  const Cell* near = it != cells_.end() ? &it->second : Nearest(key);
  const Cell& cell = near != nullptr ? *near : kEmpty;
  Fit(cell, &curve);
  double floor = -1.0;  // the largest believable t so far; negative: nothing seen yet
  for (size_t i = 0; i < kKnots; ++i) {
    const Mean& mean = cell[i].micros;
    if (cell[i].seen()) {
      curve.most_rows_seen_ = cell[i].rows;
      const double freshness = mean.Freshness(now_) * (mean.weight >= kKnownWeight ? 1.0 : 0.5);
      curve.known_[i] = mean.weight >= kKnownWeight && freshness >= kKnownFreshness;
      // Half of the value is the most that a long unseen knot may have fallen.
      floor = std::max(curve.micros_[i] * (0.5 + 0.5 * freshness), floor);
    }
    curve.optimistic_[i] = floor;
  }
  // Below all that was seen t can at best fall in proportion to the rows.
  if (floor < 0.0) curve.optimistic_ = curve.micros_;
  for (size_t i = kKnots - 1; i-- > 0;) {
    if (curve.optimistic_[i] >= 0.0) continue;
    curve.optimistic_[i] = curve.optimistic_[i + 1] * curve.rows_[i] / curve.rows_[i + 1];
  }
  curve.extra_ = prefill_row_.weight > 0.0 ? prefill_row_.value * shape.prefill_rows : 0.0;
  return curve;
}

double StepTimeModel::DraftMicros(const StepShape& shape, bool drafted) const {
  const auto& means = draft_[drafted];
  const Key key = KeyOf(shape);
  const Mean* best = nullptr;
  int best_distance = 0;
  for (const auto& [other, mean] : means) {
    const int distance = 2 * std::abs(other.first - key.first) + std::abs(other.second - key.second);
    if (best == nullptr || distance < best_distance) best = &mean, best_distance = distance;
  }
  if (best != nullptr) return best->value;
  if (!drafted) return 0.0;
  StepShape alone = shape;
  alone.prefill_rows = 0;
  return kDraftShare * Curve(alone).Micros(std::max(shape.batch, 1u));
}

}  // namespace kdt
