// Slot tables in the backend's memory follow the pool's, whatever comes and goes.
#include "worker/engine/slot_tables.h"

#include <algorithm>
#include <random>

#include "tests/support/catch.h"

namespace kdt {
namespace {

constexpr int64_t kRows = 3;
constexpr int64_t kStride = 200;

TEST_CASE("the device's tables hold what the sequences have") {
  const auto backend = std::move(*kernels::MakeCpuBackend(1));
  SlotTables tables;
  REQUIRE(tables.Allocate(*backend, kRows, kStride).ok());
  std::mt19937 random(4);
  struct Sequence {
    uint64_t id = 0;
    std::vector<int32_t> committed;
  };
  std::vector<Sequence> sequences(kRows);
  uint64_t next_id = 0;
  for (int step = 0; step < 500; ++step) {
    if (random() % 20 == 0) {  // relocated
      for (Sequence& s : sequences) {
        for (int32_t& slot : s.committed) slot = static_cast<int32_t>(random());
      }
      tables.Forget();
    }
    if (random() % 10 == 0) std::shuffle(sequences.begin(), sequences.end(), random);
    for (int64_t row = 0; row < kRows; ++row) {
      Sequence& s = sequences[row];
      if (s.id == 0 || s.committed.size() > kStride - 20) {
        s = {++next_id, {}};
        for (size_t i = random() % 50; i > 0; --i) s.committed.push_back(static_cast<int32_t>(random()));
      }
      const auto fresh = static_cast<int64_t>(s.committed.size());
      std::vector<int32_t> table = s.committed;
      for (size_t i = 1 + random() % 8; i > 0; --i) table.push_back(static_cast<int32_t>(random()));
      REQUIRE(tables.Set(row, s.id, table, fresh).ok());
      // What the step writes itself.
      std::vector<int64_t> index;
      for (size_t i = fresh; i < table.size(); ++i)
        index.push_back(tables.Index(row, static_cast<int64_t>(i)));
      REQUIRE(backend
                  ->TableWrite(
                      {index.data(), table.data() + fresh, static_cast<int64_t>(index.size()), tables.data()})
                  .ok());
      const int32_t* device = tables.data() + row * tables.stride();
      REQUIRE(std::equal(table.begin(), table.end(), device));
      // Some rows are kept, in their places or moved forward.
      const size_t kept = random() % (table.size() - fresh + 1);
      for (size_t i = 0; i < kept; ++i) {
        s.committed.push_back(random() % 3 == 0 ? static_cast<int32_t>(random()) : table[fresh + i]);
      }
    }
    tables.EndStep();
  }
}

TEST_CASE("after Clear nothing on the device is taken for known") {
  const auto backend = std::move(*kernels::MakeCpuBackend(1));
  SlotTables tables;
  REQUIRE(tables.Allocate(*backend, 1, kStride).ok());
  const std::vector<int32_t> table = {5, 6, 7};
  REQUIRE(tables.Set(0, 1, table, 3).ok());
  std::fill_n(tables.data(), 3, 0);  // as if the copy had been lost
  REQUIRE(tables.Set(0, 1, table, 3).ok());
  CHECK(tables.data()[0] == 0);
  tables.Clear();
  REQUIRE(tables.Set(0, 1, table, 3).ok());
  CHECK(std::equal(table.begin(), table.end(), tables.data()));
}

}  // namespace
}  // namespace kdt
