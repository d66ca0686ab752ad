#include <numeric>
#include <set>

#include "tests/support/catch.h"
#include "worker/kv_pool/kv_pool.h"

namespace kdt {
namespace {

void Extend(KvPool& pool, SequenceId id, int32_t rows) {
  std::vector<SlotMove> moves;
  std::vector<int32_t> kept(rows);
  std::iota(kept.begin(), kept.end(), 0);
  REQUIRE(pool.BeginRows(id, rows).ok());
  REQUIRE(pool.Commit(id, kept, &moves).ok());
}

// A pool whose free space is holes of 16 slots, with sequence 1000 of `rows` rows spread over them; then the
// rest is freed.
std::unique_ptr<KvPool> FragmentedPool(int32_t rows) {
  auto pool = std::move(KvPool::Create(64 * 16, 200, 4096)).value();
  for (SequenceId id = 0; id < 64; ++id) {
    REQUIRE(pool->CreateSequence(id, 16).ok());
    Extend(*pool, id, 16);
  }
  for (SequenceId id = 0; id < 64; id += 2) REQUIRE(pool->FreeSequence(id).ok());
  REQUIRE(pool->CreateSequence(1000, 0).ok());
  Extend(*pool, 1000, rows);
  for (SequenceId id = 1; id < 64; id += 2) REQUIRE(pool->FreeSequence(id).ok());
  return pool;
}

int64_t Runs(absl::Span<const int32_t> table) {
  int64_t runs = 0;
  for (size_t i = 0; i < table.size(); ++i) runs += i == 0 || table[i] != table[i - 1] + 1;
  return runs;
}

TEST_CASE("relocation makes one run within the budget of each call", "[kv_pool]") {
  auto pool = FragmentedPool(160);
  REQUIRE(pool->stats().runs > 4);
  int64_t moved = 0, calls = 0;
  while (true) {
    const std::vector<SlotMove> moves = pool->Relocate(50);
    if (moves.empty()) break;
    REQUIRE(moves.size() <= 50);
    std::set<int32_t> sources, targets;
    for (const SlotMove& move : moves) {
      sources.insert(move.from);
      targets.insert(move.to);
    }
    CHECK(sources.size() == moves.size());
    CHECK(targets.size() == moves.size());
    for (const int32_t slot : targets) CHECK_FALSE(sources.contains(slot));
    moved += static_cast<int64_t>(moves.size());
    ++calls;
    Extend(*pool, 1000, 2);  // decoding goes on between the calls
  }
  CHECK(calls > 2);
  CHECK(moved >= 160);
  CHECK(pool->stats().moved_rows == moved);
  CHECK(pool->stats().runs == 1);
  CHECK(Runs(pool->Table(1000)) == 1);
  CHECK(pool->Committed(1000) == 160 + 2 * calls);
  Extend(*pool, 1000, 100);
  CHECK(pool->stats().runs == 1);
}

TEST_CASE("shared slots move once for all tables", "[kv_pool]") {
  auto pool = FragmentedPool(160);
  REQUIRE(pool->ForkSequence(1001, 1000, 120, 0).ok());
  REQUIRE(pool->ForkSequence(1002, 1001, 120, 0).ok());
  Extend(*pool, 1001, 10);
  Extend(*pool, 1002, 10);
  for (auto moves = pool->Relocate(64); !moves.empty(); moves = pool->Relocate(64)) {
    std::set<int32_t> sources;
    for (const SlotMove& move : moves) sources.insert(move.from);
    CHECK(sources.size() == moves.size());
  }
  CHECK(Runs(pool->Table(1000).subspan(0, 120)) == 1);
  for (const SequenceId id : {1001, 1002}) {
    CHECK(std::equal(pool->Table(1000).begin(), pool->Table(1000).begin() + 120, pool->Table(id).begin()));
    CHECK(Runs(pool->Table(id)) <= 2);
  }
  CHECK(pool->stats().slots_shared == 120);
  CHECK(pool->stats().slots_used == 180);
  for (const SequenceId id : {1000, 1001, 1002}) REQUIRE(pool->FreeSequence(id).ok());
  CHECK(pool->stats().slots_used == 0);
  CHECK(pool->digest() == 0);
}

TEST_CASE("nothing moves during a step or without need", "[kv_pool]") {
  auto pool = FragmentedPool(160);
  REQUIRE(pool->BeginRows(1000, 4).ok());
  CHECK(pool->Relocate(1000).empty());
  std::vector<SlotMove> moves;
  REQUIRE(pool->Commit(1000, {}, &moves).ok());
  CHECK_FALSE(pool->Relocate(1000).empty());
  CHECK(pool->Relocate(1000).empty());
}

TEST_CASE("a sequence freed in mid-relocation leaves nothing behind", "[kv_pool]") {
  auto pool = FragmentedPool(160);
  REQUIRE(pool->Relocate(10).size() == 10);
  REQUIRE(pool->FreeSequence(1000).ok());
  CHECK(pool->FreeSlots() == 1024);
  REQUIRE(pool->CreateSequence(5, 0).ok());
  Extend(*pool, 5, 1024);
  CHECK(Runs(pool->Table(5)) == 1);
}

}  // namespace
}  // namespace kdt
