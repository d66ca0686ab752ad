#include "coordinator/group/seldom_line.h"

#include "tests/support/catch.h"

namespace kdt::testing {

TEST_CASE("lines that come again and again, also in turn, are each told once in ten seconds") {
  SeldomLine line;
  CHECK(line.Due("a", 1));
  CHECK_FALSE(line.Due("a", 9'000'000));
  CHECK(line.Due("b", 9'000'001));
  CHECK_FALSE(line.Due("a", 9'000'002));
  CHECK(line.TakeUntold() == 2);
  CHECK(line.TakeUntold() == 0);
  CHECK(line.Due("a", 10'000'001));
  CHECK_FALSE(line.Due("b", 19'000'000));
  CHECK(line.Due("b", 19'000'001));
  SeldomLine slow(2'000'000);
  CHECK(slow.Due("1 of 9", 1));
  CHECK_FALSE(slow.Due("2 of 9", 1'000'000));
  CHECK(slow.Due("3 of 9", 2'000'001));
  slow.Forget();
  CHECK(slow.Due("3 of 9", 2'000'002));
}

}  // namespace kdt::testing
