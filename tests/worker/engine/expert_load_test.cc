// The router's balance over the experts, as one number.
#include "worker/engine/expert_load.h"

#include <vector>

#include "tests/support/catch.h"

namespace kdt {

TEST_CASE("expert load: even, one-sided, and mean of the layers") {
  const int a = 0, b = 0;
  ExpertLoad load;
  CHECK(load.Imbalance() == 0);
  load.AddLayer(&a, 4);
  load.AddLayer(&b, 4);
  CHECK(load.Imbalance() == 0);
  load.Count(&a, std::vector<int32_t>{0, 1, 2, 3});
  CHECK(load.Imbalance() == Catch::Approx(1));  // a layer without rows does not count
  load.Count(&b, std::vector<int32_t>{2, 2, 2, 2});
  CHECK(load.Imbalance() == Catch::Approx((1 + 4) / 2.0));
}

TEST_CASE("expert load: the past fades") {
  const int layer = 0;
  ExpertLoad load;
  load.AddLayer(&layer, 2);
  load.Count(&layer, std::vector<int32_t>(5000, 0));
  CHECK(load.Imbalance() == Catch::Approx(2));
  std::vector<int32_t> even;
  for (int i = 0; i < 128; ++i) even.push_back(i % 2);
  for (int i = 0; i < 100; ++i) load.Count(&layer, even);
  CHECK(load.Imbalance() < 1.05);
}

TEST_CASE("expert load: distinct experts of the busiest rank over the mean rank's") {
  const int layer = 0;
  ExpertLoad load(4);
  load.AddLayer(&layer, 8);
  CHECK(load.RankImbalance() == 0);
  load.Count(&layer, std::vector<int32_t>{0, 1, 1, 0, -1, 4});  // ranks 0 and 2 have 2 and 1
  CHECK(load.RankImbalance() == Catch::Approx(2 / (3 / 4.0)));
  load.Count(&layer, std::vector<int32_t>{0, 2, 4, 6, -1, -1});  // one each
  CHECK(load.RankImbalance() == Catch::Approx((2 + 1) / (3 / 4.0 + 1)));
  for (int i = 0; i < 300000; ++i) load.Count(&layer, std::vector<int32_t>{0, 2, 4, 6});
  CHECK(load.RankImbalance() == Catch::Approx(1).margin(1e-3));
}

}  // namespace kdt
