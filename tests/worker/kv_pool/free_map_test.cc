#include "worker/kv_pool/free_map.h"

#include <random>
#include <set>

#include "tests/support/catch.h"

namespace kdt {
namespace {

int32_t NaiveLowestFit(const std::vector<bool>& in, int64_t size) {
  int64_t run = 0;
  for (size_t slot = 0; slot < in.size(); ++slot) {
    run = in[slot] ? run + 1 : 0;
    if (run == size) return static_cast<int32_t>(slot - size + 1);
  }
  return -1;
}

int32_t NaiveLongest(const std::vector<bool>& in) {
  int32_t best = 0, run = 0;
  for (const bool bit : in) best = std::max(best, run = bit ? run + 1 : 0);
  return best;
}

TEST_CASE("free map agrees with a plain scan", "[kv_pool]") {
  for (const int64_t limit : {1, 63, 64, 65, 500, 1024, 3001}) {
    std::mt19937 random(static_cast<unsigned>(limit));
    FreeMap map(limit);
    std::vector<bool> in(limit, false);
    for (int step = 0; step < 600; ++step) {
      // A random stretch of equal bits is flipped: what the pool does when it takes or frees an extent.
      const int32_t begin = static_cast<int32_t>(random() % limit);
      const bool value = !in[begin];
      const int32_t most = 1 + static_cast<int32_t>(random() % (step % 3 == 0 ? 300 : 9));
      int32_t size = 0;
      while (begin + size < limit && size < most && in[begin + size] != value) in[begin + size++] = value;
      value ? map.Add({begin, size}) : map.Remove({begin, size});

      REQUIRE(map.count() == std::count(in.begin(), in.end(), true));
      REQUIRE(map.longest() == NaiveLongest(in));
      const int64_t wanted = 1 + random() % (step % 2 == 0 ? 8 : 400);
      REQUIRE(map.LowestFit(wanted) == NaiveLowestFit(in, wanted));
      const int32_t at = static_cast<int32_t>(random() % limit);
      int32_t run = 0;
      while (at + run < limit && in[at + run]) ++run;
      REQUIRE(map.RunAt(at, 1000000) == run);
      REQUIRE(map.RunAt(at, 5) == std::min(run, 5));
    }
    map.Clear();
    CHECK(map.count() == 0);
    CHECK(map.LowestFit(1) == -1);
  }
}

}  // namespace
}  // namespace kdt
