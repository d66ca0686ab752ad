#include "tests/support/catch.h"
#include "worker/kv_pool/kv_pool.h"

namespace kdt {
namespace {

std::unique_ptr<KvPool> MakePool(int64_t slots, int64_t max_sequences = 8, int64_t max_context = 1000) {
  auto pool = KvPool::Create(slots, max_sequences, max_context);
  REQUIRE(pool.ok());
  return std::move(pool).value();
}

std::vector<int32_t> TableOf(const KvPool& pool, SequenceId id) {
  const auto table = pool.Table(id);
  return {table.begin(), table.end()};
}

std::vector<int32_t> All(int32_t rows) {
  std::vector<int32_t> kept(rows);
  for (int32_t i = 0; i < rows; ++i) kept[i] = i;
  return kept;
}

void Extend(KvPool& pool, SequenceId id, int32_t rows) {
  std::vector<SlotMove> moves;
  REQUIRE(pool.BeginRows(id, rows).ok());
  REQUIRE(pool.Commit(id, All(rows), &moves).ok());
  REQUIRE(moves.empty());
}

TEST_CASE("pool sizes are checked", "[kv_pool]") {
  CHECK_FALSE(KvPool::Create(0, 1, 1).ok());
  CHECK_FALSE(KvPool::Create(int64_t{1} << 31, 1, 1).ok());
  CHECK_FALSE(KvPool::Create(1, 0, 1).ok());
  CHECK_FALSE(KvPool::Create(1, 1, 0).ok());
  auto pool = MakePool(1);
  REQUIRE(pool->CreateSequence(1, 0).ok());
  REQUIRE(pool->BeginRows(1, 1).ok());
  CHECK(TableOf(*pool, 1) == std::vector<int32_t>{1});
}

TEST_CASE("commit compacts the accepted path in place", "[kv_pool]") {
  auto pool = MakePool(100);
  REQUIRE(pool->CreateSequence(7, 50).ok());
  Extend(*pool, 7, 3);
  REQUIRE(pool->BeginRows(7, 8).ok());
  CHECK(pool->Table(7).size() == 11);
  CHECK(pool->Committed(7) == 3);
  std::vector<SlotMove> moves;
  const std::vector<int32_t> kept = {0, 2, 5};
  REQUIRE(pool->Commit(7, kept, &moves).ok());
  REQUIRE(moves.size() == 2);
  CHECK((moves[0].from == 6 && moves[0].to == 5));
  CHECK((moves[1].from == 9 && moves[1].to == 6));
  CHECK(TableOf(*pool, 7) == std::vector<int32_t>{1, 2, 3, 4, 5, 6});
  CHECK(pool->FreeSlots() == 94);
  CHECK(pool->stats().moved_rows == 2);

  SECTION("bad kept rows change nothing") {
    REQUIRE(pool->BeginRows(7, 2).ok());
    const uint64_t digest = pool->digest();
    for (const std::vector<int32_t>& bad : {std::vector<int32_t>{2}, {-1}, {1, 1}, {1, 0}}) {
      CHECK(pool->Commit(7, bad, &moves).code() == absl::StatusCode::kInvalidArgument);
    }
    CHECK(pool->digest() == digest);
    CHECK(pool->BeginRows(7, 1).code() == absl::StatusCode::kFailedPrecondition);
  }
  SECTION("keeping nothing restores the state before the rows") {
    const uint64_t digest = pool->digest();
    REQUIRE(pool->BeginRows(7, 20).ok());
    CHECK(pool->digest() != digest);
    REQUIRE(pool->Commit(7, {}, &moves).ok());
    CHECK(pool->digest() == digest);
    CHECK(pool->FreeSlots() == 94);
  }
}

TEST_CASE("sequences that grow in turns stay in one run each", "[kv_pool]") {
  auto pool = MakePool(4000);
  for (SequenceId id = 1; id <= 4; ++id) REQUIRE(pool->CreateSequence(id, 600).ok());
  for (int round = 0; round < 100; ++round) {
    for (SequenceId id = 1; id <= 4; ++id) {
      std::vector<SlotMove> moves;
      REQUIRE(pool->BeginRows(id, 32).ok());
      REQUIRE(pool->Commit(id, All(5), &moves).ok());
    }
  }
  CHECK(pool->stats().runs == 4);
  CHECK(pool->stats().slots_used == 2000);
}

TEST_CASE("reserved room is given up before an allocation fails", "[kv_pool]") {
  auto pool = MakePool(100);
  REQUIRE(pool->CreateSequence(1, 1000).ok());
  Extend(*pool, 1, 10);
  REQUIRE(pool->CreateSequence(2, 1000).ok());
  Extend(*pool, 2, 90);
  CHECK(pool->FreeSlots() == 0);
  const uint64_t digest = pool->digest();
  CHECK(pool->BeginRows(2, 1).code() == absl::StatusCode::kResourceExhausted);
  CHECK(pool->digest() == digest);
  REQUIRE(pool->FreeSequence(1).ok());
  Extend(*pool, 2, 10);
  CHECK(pool->Table(2).size() == 100);
}

TEST_CASE("limits and unknown ids have their own errors", "[kv_pool]") {
  auto pool = MakePool(100, 2, 20);
  std::vector<SlotMove> moves;
  REQUIRE(pool->CreateSequence(1, 0).ok());
  CHECK(pool->CreateSequence(1, 0).code() == absl::StatusCode::kInvalidArgument);
  CHECK(pool->CreateSequence(2, -1).code() == absl::StatusCode::kInvalidArgument);
  REQUIRE(pool->CreateSequence(2, 0).ok());
  CHECK(pool->CreateSequence(3, 0).code() == absl::StatusCode::kResourceExhausted);
  CHECK(pool->BeginRows(1, 21).code() == absl::StatusCode::kOutOfRange);
  CHECK(pool->BeginRows(1, -1).code() == absl::StatusCode::kInvalidArgument);
  CHECK(pool->BeginRows(9, 1).code() == absl::StatusCode::kNotFound);
  CHECK(pool->Commit(9, {}, &moves).code() == absl::StatusCode::kNotFound);
  CHECK(pool->FreeSequence(9).code() == absl::StatusCode::kNotFound);
  REQUIRE(pool->FreeSequence(2).ok());
  CHECK(pool->ForkSequence(3, 9, 1, 0).code() == absl::StatusCode::kNotFound);
  CHECK(pool->ForkSequence(3, 1, 1, 0).code() == absl::StatusCode::kOutOfRange);
  CHECK_FALSE(pool->Alive(3));
}

TEST_CASE("forks share slots until the last of them goes", "[kv_pool]") {
  auto pool = MakePool(100);
  REQUIRE(pool->CreateSequence(1, 0).ok());
  Extend(*pool, 1, 10);
  REQUIRE(pool->BeginRows(1, 4).ok());
  // The parent has tentative rows: only committed ones can be shared.
  CHECK(pool->ForkSequence(2, 1, 11, 0).code() == absl::StatusCode::kOutOfRange);
  REQUIRE(pool->ForkSequence(2, 1, 6, 0).ok());
  CHECK(pool->stats().slots_shared == 6);
  CHECK(pool->stats().slots_used == 14);
  REQUIRE(pool->BeginRows(2, 3).ok());
  for (const int32_t slot : pool->Table(2).subspan(6)) {
    for (const int32_t other : pool->Table(1)) CHECK(slot != other);
  }
  std::vector<SlotMove> moves;
  const std::vector<int32_t> kept = {1};
  REQUIRE(pool->Commit(2, kept, &moves).ok());
  REQUIRE(moves.size() == 1);
  for (const int32_t other : pool->Table(1)) CHECK(moves[0].to != other);
  REQUIRE(pool->FreeSequence(1).ok());
  CHECK(pool->stats().slots_shared == 0);
  CHECK(pool->stats().slots_used == 7);
  REQUIRE(pool->FreeSequence(2).ok());
  CHECK(pool->stats().slots_used == 0);
  CHECK(pool->digest() == 0);
  CHECK(pool->stats().fragmentation == 0);
}

}  // namespace
}  // namespace kdt
