#include "coordinator/ddtree/step_time_model.h"

#include <cmath>
#include <limits>

#include "tests/support/catch.h"

namespace kdt {
namespace {

StepShape Shape(uint32_t rows, uint32_t batch = 1, uint64_t context = 100, uint32_t prefill = 0) {
  return {.rows = rows, .prefill_rows = prefill, .context_tokens = context, .batch = batch};
}

double Line(double rows) { return 1000.0 + 200.0 * rows; }

TEST_CASE("before any step t rises steeply, and nothing counts as known") {
  const StepTimeModel model;
  const RowCurve curve = model.Curve(Shape(1));
  CHECK(curve.Micros(16) > 2.0 * curve.Micros(1));
  CHECK_FALSE(curve.Known(1));
  CHECK(curve.most_rows_seen() == 0.0);
  CHECK(model.DraftMicros(Shape(1), true) > 0.0);
  CHECK(model.DraftMicros(Shape(1), false) == 0.0);
}

TEST_CASE("the curve passes through what was seen and never falls") {
  StepTimeModel model;
  for (int i = 0; i < 5; ++i) {
    for (const uint32_t rows : {1u, 4u, 9u, 16u, 33u}) model.Observe(Shape(rows), true, Line(rows), 80.0);
  }
  const RowCurve curve = model.Curve(Shape(1));
  for (const uint32_t rows : {1u, 2u, 3u, 4u, 7u, 9u, 12u, 16u, 20u, 33u}) {
    INFO(rows);
    CHECK(curve.Micros(rows) == Catch::Approx(Line(rows)).epsilon(1e-9));
    CHECK(curve.OptimisticMicros(rows) <= curve.Micros(rows) * 1.000001);
  }
  for (uint32_t rows = 1; rows < 3000; ++rows) REQUIRE(curve.Micros(rows + 1) >= curve.Micros(rows));
  CHECK(curve.Known(9));
  CHECK_FALSE(curve.Known(24));
  CHECK(curve.most_rows_seen() == 33.0);
  // Beyond what was seen: steep for decisions, flat for what may be worth a try.
  CHECK(curve.Micros(64) > 1.3 * curve.Micros(33));
  CHECK(curve.OptimisticMicros(64) == Catch::Approx(curve.Micros(33)).epsilon(0.01));
  CHECK(model.DraftMicros(Shape(1), true) == Catch::Approx(80.0));

  // A slow small step beside a fast larger one is noise: both move to a common value.
  StepTimeModel noisy;
  for (int i = 0; i < 3; ++i)
    noisy.Observe(Shape(8), true, 3000.0, 0.0), noisy.Observe(Shape(12), true, 2800.0, 0.0);
  CHECK(noisy.Curve(Shape(1)).Micros(8) == Catch::Approx(2900.0));
  CHECK(noisy.Curve(Shape(1)).Micros(12) == Catch::Approx(2900.0));
}

TEST_CASE("a stalled step hardly counts, a changed machine does") {
  StepTimeModel model;
  for (int i = 0; i < 20; ++i)
    model.Observe(Shape(1), true, 1000.0, 50.0), model.Observe(Shape(16), true, 4000.0, 50.0);
  CHECK_FALSE(model.Observe(Shape(16), true, 400000.0, 50.0));
  CHECK(model.Curve(Shape(1)).Micros(16) < 4400.0);
  bool changed = false;
  for (int i = 0; i < 4; ++i) changed |= model.Observe(Shape(16), true, 5600.0, 50.0);
  CHECK(changed);
  // A moderate change: the rest of the curve moves along, but is not known any more.
  RowCurve curve = model.Curve(Shape(1));
  CHECK(curve.Micros(16) == Catch::Approx(5600.0));
  CHECK(curve.Micros(1) == Catch::Approx(1400.0).epsilon(0.1));
  CHECK_FALSE(curve.Known(1));
  CHECK(curve.Known(16));
  // A large one: nothing is believed of the rest; it might be anything down to its share of rows.
  for (int i = 0; i < 10; ++i) model.Observe(Shape(16), true, 56000.0, 50.0);
  curve = model.Curve(Shape(1));
  CHECK(curve.Micros(16) == Catch::Approx(56000.0));
  CHECK(curve.OptimisticMicros(1) == Catch::Approx(56000.0 / 16));
}

TEST_CASE("old knowledge fades") {
  StepTimeModel model;
  for (int i = 0; i < 5; ++i) model.Observe(Shape(16), true, 4000.0, 0.0);
  for (int i = 0; i < 3000; ++i) model.Observe(Shape(1), true, 1000.0, 0.0);
  CHECK(model.Curve(Shape(1)).Known(16));
  CHECK(model.Curve(Shape(1)).OptimisticMicros(16) < 3000.0);
  for (int i = 0; i < 3000; ++i) model.Observe(Shape(1), true, 1000.0, 0.0);
  CHECK_FALSE(model.Curve(Shape(1)).Known(16));
  CHECK(model.Curve(Shape(1)).Micros(16) == Catch::Approx(4000.0));
}

TEST_CASE("buckets of batch and context are apart; a new one begins as its neighbour") {
  StepTimeModel model;
  for (int i = 0; i < 8; ++i) model.Observe(Shape(8, 1, 100), true, 2000.0, 100.0);
  CHECK(model.Curve(Shape(8, 1, 60000)).Micros(8) == Catch::Approx(2000.0));
  for (int i = 0; i < 8; ++i) model.Observe(Shape(8, 1, 60000), true, 5000.0, 300.0);
  CHECK(model.Curve(Shape(8, 1, 60000)).Micros(8) == Catch::Approx(5000.0).epsilon(0.1));
  CHECK(model.Curve(Shape(8, 1, 100)).Micros(8) == Catch::Approx(2000.0));
  CHECK(model.Curve(Shape(8, 1, 110000)).Micros(8) > 4000.0);
  CHECK(model.DraftMicros(Shape(8, 1, 60000), true) == Catch::Approx(300.0).epsilon(0.1));
  CHECK(model.DraftMicros(Shape(8, 1, 100), true) == Catch::Approx(100.0));
}

TEST_CASE("prefill rows cost extra and do not bend the curve") {
  StepTimeModel model;
  for (int i = 0; i < 8; ++i) model.Observe(Shape(4), true, 1000.0, 0.0);
  for (int i = 0; i < 8; ++i) model.Observe(Shape(4, 1, 100, 100), true, 6000.0, 0.0);
  CHECK(model.Curve(Shape(4)).Micros(4) == Catch::Approx(1000.0));
  CHECK(model.Curve(Shape(4, 1, 100, 100)).Micros(4) == Catch::Approx(6000.0));
  CHECK(model.Curve(Shape(4, 1, 100, 200)).Micros(4) == Catch::Approx(11000.0));
}

TEST_CASE("nonsense is ignored") {
  StepTimeModel model;
  for (const double bad :
       {0.0, -1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    model.Observe(Shape(4), true, bad, 1.0);
  }
  model.Observe(Shape(4), true, 1.0, std::numeric_limits<double>::quiet_NaN());
  model.Observe(Shape(4), true, 1.0, -1.0);
  model.Observe(Shape(0), true, 1.0, 1.0);
  model.Observe(Shape(4, 0), true, 1.0, 1.0);
  CHECK_FALSE(model.Curve(Shape(4)).Known(4));
  CHECK(model.Curve(Shape(4)).most_rows_seen() == 0.0);
  CHECK(StepTimeModel::NearestKnot(0) == 0);
  CHECK(StepTimeModel::NearestKnot(4000000000u) == kRowKnots.size() - 1);
}

}  // namespace
}  // namespace kdt
