// How long a step takes, learnt from live steps: t(rows, context, batch).
//
// A mixture-of-experts makes t steep (16 tokens touch 14 times as many experts as one), a GPU makes it flat
// in places, a busy machine changes it from one minute to the next. So nothing is assumed but that t does not
// fall with more rows. For each bucket of context and batch there is a curve over a ladder of row counts
// ("knots"): decaying means of what was seen there, made monotone, with a cautious prior where nothing was
// seen.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

namespace kdt {

struct StepShape {
  uint32_t rows = 0;            // verified rows: roots and drafted nodes of all sequences
  uint32_t prefill_rows = 0;    // prompt tokens beside them
  uint64_t context_tokens = 0;  // committed tokens of all verified sequences together
  uint32_t batch = 0;           // verified sequences
};

// Row counts whose times are kept apart; a step counts for the nearest by ratio.
inline constexpr std::array<uint32_t, 38> kRowKnots = {
    1,  2,  3,  4,  5,  6,  7,  8,  9,   10,  11,  12,  14,  16,  18,  20,  24,   28,   32,
    36, 40, 48, 56, 64, 72, 80, 96, 112, 128, 160, 192, 256, 384, 512, 768, 1024, 1536, 2048};

// t over rows for one bucket, frozen at the time it was taken.
class RowCurve {
 public:
  double Micros(uint32_t rows) const;
  // No more than a believable t at this row count: equal to Micros where fresh steps were seen, lower where
  // the last are long ago, and as flat as monotone allows beyond what was seen. For deciding what is worth
  // exploring.
  double OptimisticMicros(uint32_t rows) const;
  // Steps near this row count were seen, and not too long ago.
  bool Known(uint32_t rows) const;
  // The largest row count of the steps behind the curve; 0 before any.
  double most_rows_seen() const { return most_rows_seen_; }

 private:
  friend class StepTimeModel;
  std::array<double, kRowKnots.size()> rows_{};  // rising: the mean row count seen around a knot, or the knot
  std::array<double, kRowKnots.size()> micros_{};
  std::array<double, kRowKnots.size()> optimistic_{};
  std::array<bool, kRowKnots.size()> known_{};
  double most_rows_seen_ = 0.0;
  double extra_ = 0.0;  // of the prefill rows beside
};

class StepTimeModel {
 public:
  // One finished step: `micros` is its whole duration less the drafter's, `draft_micros` the drafter's share,
  // with `drafted` saying whether it proposed a block or only kept its context up to date. Durations that are
  // not positive (draft: negative) or not finite are ignored. Returns true when the step shows that the
  // machine has changed.
  bool Observe(const StepShape& shape, bool drafted, double micros, double draft_micros);

  RowCurve Curve(const StepShape& shape) const;
  // Expected duration of the drafter's part. Before anything was seen: a tenth of a step with one row a
  // sequence when drafting, nothing when not.
  double DraftMicros(const StepShape& shape, bool drafted) const;
  uint64_t steps() const { return now_; }

  // The nearest knot of the ladder, by ratio.
  static size_t NearestKnot(uint32_t rows);

 private:
  // A mean in which old values fade.
  struct Mean {
    double value = 0.0;
    double weight = 0.0;  // values it stands for, at most kWindow
    uint64_t last = 0;    // step of the last value
    int surprises = 0;    // consecutive values far above (+) or below (-)
    std::array<double, 4> surprising{};
    bool Add(double value, uint64_t now);  // true: the values have moved for good
    double Freshness(uint64_t now) const;  // 0 .. 1
  };
  struct Knot {
    Mean micros;
    double rows = 0.0;  // mean row count of the values in `micros`
    bool seen() const { return micros.weight > 0.0; }
  };
  using Cell = std::array<Knot, kRowKnots.size()>;
  using Key = std::pair<int, int>;  // buckets of batch and context

  static Key KeyOf(const StepShape& shape);
  const Cell* Nearest(Key key) const;
  Cell& Touch(Key key);
  void Fit(const Cell& cell, RowCurve* curve) const;

  std::map<Key, Cell> cells_;
  std::map<Key, Mean> draft_[2];  // [drafted]
  Mean prefill_row_;              // us a prefill row
  uint64_t now_ = 0;
};

}  // namespace kdt
