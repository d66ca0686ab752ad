#include "kdt/kernels/compare.h"

#include <cmath>
#include <limits>

#include "tests/kernels/cpu/util.h"

namespace kdt::kernels::test {
namespace {

TEST_CASE("compare counts distances in bf16 steps of the value and of the row") {
  const auto backend = MakeBackend();
  // Steps: 2^-7 at 1 .. 2, 2^-1 at 64 .. 128.
  Matrix reference(2, 4, 3), value(2, 4, 1);
  const float exact[8] = {1.0f, 100.0f, 0.0f, -1.5f, 1.0f, 1.0f, 1.0f, 1.0f};
  const float close = 1.0f / 128;
  const float got[8] = {1.0f + 3 * close, 100.5f, 0.0f, -1.5f - close, 1.0f, 1.0f, 1.0f + 2 * close, 1.0f};
  for (int i = 0; i < 8; ++i) {
    reference.at(i / 4, i % 4) = exact[i];
    value.at(i / 4, i % 4) = got[i];
  }
  CompareStats stats{};
  REQUIRE(backend->Compare({value.tensor(), reference.tensor(), nullptr, &stats}).ok());
  CHECK(stats.values == 8);
  CHECK(stats.beyond_one == 2);
  CHECK(stats.beyond_one_of_row == 1);  // of the second row; 3 / 128 is little beside 100
  CHECK(stats.largest == 3.0f);
  CHECK(stats.largest_of_row == 2.0f);

  SECTION("it adds up, and looks at used rows only") {
    const int32_t used = 1;
    REQUIRE(backend->Compare({value.tensor(), reference.tensor(), &used, &stats}).ok());
    CHECK(stats.values == 12);
    CHECK(stats.beyond_one == 3);
    CHECK(stats.beyond_one_of_row == 1);
  }
  SECTION("NaN and infinities agree with themselves only") {
    const float nan = std::nanf(""), infinity = std::numeric_limits<float>::infinity();
    const float exact_row[4] = {nan, infinity, 1.0f, nan}, row[4] = {nan, infinity, nan, 1.0f};
    for (int i = 0; i < 4; ++i) {
      reference.at(0, i) = exact_row[i];
      value.at(0, i) = row[i];
    }
    const int32_t used = 1;
    stats = {};
    REQUIRE(backend->Compare({value.tensor(), reference.tensor(), &used, &stats}).ok());
    CHECK(stats.beyond_one == 2);
    CHECK(std::isinf(stats.largest));
  }
  SECTION("a reference is rounded to bf16 first") {
    reference.at(1, 0) = 1.0f + close / 4;
    stats = {};
    REQUIRE(backend->Compare({reference.tensor(), reference.tensor(), nullptr, &stats}).ok());
    CHECK(stats.largest == 0.25f);
  }
}

}  // namespace
}  // namespace kdt::kernels::test
