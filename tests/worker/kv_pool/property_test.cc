// Random operations on two pools and on a model that knows nothing of slots: for each sequence the contents
// of its tokens. Contents are kept in an array indexed by slot, and every move is applied to it, so a wrong
// slot shows as a wrong token.
#include <map>
#include <random>
#include <set>

#include "tests/support/catch.h"
#include "worker/kv_pool/kv_pool.h"

namespace kdt {
namespace {

constexpr int64_t kMaxSequences = 12, kMaxContext = 400;

class World {
 public:
  World(int64_t slots, uint64_t seed)
      : pool_(std::move(KvPool::Create(slots, kMaxSequences, kMaxContext)).value()),
        twin_(std::move(KvPool::Create(slots, kMaxSequences, kMaxContext)).value()),
        slots_(slots),
        content_(slots + 1),
        random_(seed) {}

  void RandomOperation() {
    const int64_t dice = Below(100);
    if (model_.empty() || dice < 4) return Create();
    if (dice < 8) return Fork();
    if (dice < 13) return Free();
    if (dice < 22) return Relocate(1 + Below(60));
    if (dice == 99 && Below(200) == 0) return Clear();
    Grow();
  }

  void CheckAgainstModel() const {
    REQUIRE(pool_->digest() == twin_->digest());
    std::map<int32_t, int> references;
    int64_t runs = 0;
    for (const auto& [id, tokens] : model_) {
      REQUIRE(pool_->Committed(id) == static_cast<int64_t>(tokens.size()));
      const auto table = pool_->Table(id);
      REQUIRE(table.size() == tokens.size());
      for (size_t p = 0; p < tokens.size(); ++p) {
        if (table[p] < 1 || table[p] > slots_ || content_[table[p]] != tokens[p])
          FAIL("token " << p << " of " << id);
        runs += p == 0 || table[p] != table[p - 1] + 1;
        ++references[table[p]];
      }
    }
    const KvPoolStats stats = pool_->stats();
    CHECK(stats.slots_used == static_cast<int64_t>(references.size()));
    CHECK(stats.slots_shared == std::count_if(references.begin(), references.end(),
                                              [](const auto& entry) { return entry.second > 1; }));
    CHECK(stats.runs == runs);
    CHECK(stats.sequences == static_cast<int64_t>(model_.size()));
    CHECK(pool_->FreeSlots() == slots_ - stats.slots_used);
    CHECK(stats.fragmentation == Fragmentation(references));
  }

  void FreeAll() {
    while (!model_.empty()) Free();
    CHECK(pool_->FreeSlots() == slots_);
    CHECK(pool_->digest() == 0);
  }
  int64_t grown() const { return grown_; }
  int64_t refused() const { return refused_; }

 private:
  int64_t Below(int64_t bound) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(bound)); }

  SequenceId Pick() {
    auto it = model_.begin();
    std::advance(it, Below(static_cast<int64_t>(model_.size())));
    return it->first;
  }

  void Apply(const std::vector<SlotMove>& moves, const std::vector<SlotMove>& twin_moves) {
    REQUIRE(moves.size() == twin_moves.size());
    for (size_t i = 0; i < moves.size(); ++i) {
      if (moves[i].from != twin_moves[i].from || moves[i].to != twin_moves[i].to) FAIL("moves differ");
      content_[moves[i].to] = content_[moves[i].from];
    }
  }

  void Create() {
    const SequenceId id = next_id_++;
    const int64_t expected = Below(3) * Below(kMaxContext);
    const absl::Status status = pool_->CreateSequence(id, expected);
    REQUIRE(status == twin_->CreateSequence(id, expected));
    REQUIRE(status.ok() == (static_cast<int64_t>(model_.size()) < kMaxSequences));
    if (status.ok()) model_[id];
  }

  void Fork() {
    const SequenceId id = next_id_++, parent = Pick();
    const int64_t committed = static_cast<int64_t>(model_[parent].size());
    const int64_t length = 1 + Below(committed + 1), expected = Below(kMaxContext);
    // Sometimes while the parent has tentative rows, which must stay its own.
    const bool tentative = Below(3) == 0 && Begin(parent, 5);
    const absl::Status status = pool_->ForkSequence(id, parent, length, expected);
    REQUIRE(status == twin_->ForkSequence(id, parent, length, expected));
    REQUIRE(status.ok() == (length <= committed && static_cast<int64_t>(model_.size()) < kMaxSequences));
    if (status.ok()) model_[id].assign(model_[parent].begin(), model_[parent].begin() + length);
    if (tentative) Commit(parent, 5);
  }

  void Free() {
    const SequenceId id = Pick();
    REQUIRE(pool_->FreeSequence(id).ok());
    REQUIRE(twin_->FreeSequence(id).ok());
    model_.erase(id);
  }

  void Clear() {
    pool_->Clear();
    twin_->Clear();
    model_.clear();
  }

  void Relocate(int64_t budget) {
    const std::vector<SlotMove> moves = pool_->Relocate(budget);
    REQUIRE(static_cast<int64_t>(moves.size()) <= budget);
    std::set<int32_t> sources;
    for (const SlotMove& move : moves) sources.insert(move.from);
    for (const SlotMove& move : moves) {
      if (sources.contains(move.to)) FAIL("slot " << move.to << " is source and target");
    }
    Apply(moves, twin_->Relocate(budget));
  }

  // A batch of sequences begins rows together, as in a step, and commits in the same order.
  void Grow() {
    std::vector<std::pair<SequenceId, int64_t>> begun;
    for (auto& [id, tokens] : model_) {
      if (Below(3) != 0) continue;
      const int64_t rows = Below(Below(10) == 0 ? 150 : 20);
      if (Begin(id, rows)) begun.push_back({id, rows});
    }
    for (const auto& [id, rows] : begun) Commit(id, rows);
  }

  bool Begin(SequenceId id, int64_t rows) {
    const int64_t free = pool_->FreeSlots(), committed = static_cast<int64_t>(model_[id].size());
    const absl::Status status = pool_->BeginRows(id, rows);
    REQUIRE(status == twin_->BeginRows(id, rows));
    REQUIRE(status.ok() == (rows <= free && committed + rows <= kMaxContext));
    if (!status.ok()) {
      ++refused_;
      return false;
    }
    const auto table = pool_->Table(id);
    REQUIRE(static_cast<int64_t>(table.size()) == committed + rows);
    for (int64_t row = 0; row < rows; ++row) content_[table[committed + row]] = next_content_++;
    return true;
  }

  void Commit(SequenceId id, int64_t rows) {
    std::vector<uint64_t>& tokens = model_[id];
    const auto table = pool_->Table(id);
    const int64_t committed = static_cast<int64_t>(tokens.size()), style = Below(3);
    std::vector<int32_t> kept;
    for (int64_t row = 0; row < rows; ++row) {
      if (style != 0 && Below(4) < style) continue;
      kept.push_back(static_cast<int32_t>(row));
      tokens.push_back(content_[table[committed + row]]);
    }
    std::vector<SlotMove> moves, twin_moves;
    REQUIRE(pool_->Commit(id, kept, &moves).ok());
    REQUIRE(twin_->Commit(id, kept, &twin_moves).ok());
    Apply(moves, twin_moves);
    grown_ += static_cast<int64_t>(kept.size());
  }

  double Fragmentation(const std::map<int32_t, int>& references) const {
    int64_t longest = 0, run = 0, free = 0;
    for (int32_t slot = 1; slot <= slots_; ++slot) {
      run = references.contains(slot) ? 0 : run + 1;
      free += run > 0;
      longest = std::max(longest, run);
    }
    return free == 0 ? 0 : 1.0 - static_cast<double>(longest) / static_cast<double>(free);
  }

  std::unique_ptr<KvPool> pool_, twin_;
  int64_t slots_;
  std::vector<uint64_t> content_;  // by slot
  std::map<SequenceId, std::vector<uint64_t>> model_;
  std::mt19937_64 random_;
  uint64_t next_content_ = 1;
  SequenceId next_id_ = 1;
  int64_t grown_ = 0, refused_ = 0;
};

TEST_CASE("random operations keep every token", "[kv_pool]") {
  // Small pools are full most of the time, the large one never.
  for (const int64_t slots : {1, 50, 700, 1500, 5000}) {
    World world(slots, static_cast<uint64_t>(slots));
    for (int operation = 1; operation <= 200000; ++operation) {
      world.RandomOperation();
      if (operation % 500 == 0) world.CheckAgainstModel();
    }
    CHECK(world.grown() > 1000);
    CHECK((slots == 5000 || world.refused() > 1000));
    world.FreeAll();
  }
}

}  // namespace
}  // namespace kdt
