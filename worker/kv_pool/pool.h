// The implementation behind kv_pool.h, in two parts: allocation and tables (pool.cc), relocation
// (relocation.cc).
//
// Sharing has the shape of a tree: a fork takes over a prefix of its parent's table, so a slot stands at the
// same position in every table that names it, and the sharers of a position also share all positions before
// it.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "worker/kv_pool/free_map.h"
#include "worker/kv_pool/kv_pool.h"

namespace kdt {

class Pool final : public KvPool {
 public:
  Pool(int64_t slots, int64_t max_sequences, int64_t max_context);

  absl::Status CreateSequence(SequenceId id, int64_t expected_tokens) override;
  absl::Status ForkSequence(SequenceId id, SequenceId parent, int64_t length,
                            int64_t expected_tokens) override;
  absl::Status FreeSequence(SequenceId id) override;
  void Clear() override;

  absl::Status BeginRows(SequenceId id, int64_t rows) override;
  absl::Status Commit(SequenceId id, absl::Span<const int32_t> kept, std::vector<SlotMove>* moves) override;
  std::vector<SlotMove> Relocate(int64_t max_rows) override;

  bool Alive(SequenceId id) const override { return sequences_.contains(id); }
  absl::Span<const int32_t> Table(SequenceId id) const override;
  int64_t Committed(SequenceId id) const override;
  int64_t FreeSlots() const override { return free_.count(); }
  uint64_t digest() const override { return digest_; }
  KvPoolStats stats() const override;
  int64_t max_context() const override { return max_context_; }

 private:
  struct Sequence {
    uint64_t salt = 0;  // of the id, for the digest
    int64_t expected = 0;
    int64_t committed = 0;
    int64_t runs = 0;
    std::vector<int32_t> table;
    // Free slots that others take last: the room to grow into, right behind the table's last slot once it is
    // used.
    Extent reserve;
    // Runs when a search for something to relocate last came back with nothing; -1: not searched since a
    // change.
    int64_t settled_runs = -1;
    int64_t relocated = 0;  // the last call of Relocate that moved rows of it

    int64_t tentative() const { return static_cast<int64_t>(table.size()) - committed; }
  };
  // Ordered: every rank goes through the sequences in the same order.
  using Sequences = std::map<SequenceId, Sequence>;

  // A range of positions on its way to one run; may take several calls.
  struct Relocation {
    SequenceId id = 0;
    int64_t position = 0;  // next to move
    int64_t end = 0;       // behind the last position to move; grows with the sequence when to_end
    bool to_end = false;   // the range reaches the sequence's end and nobody shares its last slot
    Extent target;         // what is left of the reserved target
  };
  struct Window {
    int64_t begin = 0, end = 0;  // positions
    int64_t gain = 0;            // runs saved
  };

  // pool.cc
  absl::Status CheckNew(SequenceId id, int64_t expected_tokens) const;
  void Append(Sequence& sequence, Extent extent);
  void TakeReserve(Sequence& sequence, int64_t* rows);
  int64_t WantedRoom(const Sequence& sequence, int64_t rows) const;
  Extent FindRoom(const Sequence& sequence, int64_t rows);
  Extent TakeOpen(int32_t begin, int64_t size);
  bool GiveUpReserve(int64_t rows);
  void DropTail(Sequence& sequence, int64_t length);
  void SetReserve(Sequence& sequence, Extent reserve);
  void Unsettle();

  // relocation.cc
  bool PlanRelocation();
  Window BestWindow(const Sequence& sequence, int64_t max_rows) const;
  bool ContinuesBehind(const Sequence& sequence, int64_t position) const;
  void MoveRows(int64_t rows, std::vector<SlotMove>* moves);
  void Redirect(Sequence& sequence, int64_t position, absl::Span<const SlotMove> moves);
  void EndRelocation();

  const int64_t slots_, max_sequences_, max_context_;
  Sequences sequences_;
  std::vector<int32_t> references_;  // [slots + 1] tables that name the slot
  FreeMap free_;                     // slots without a reference
  FreeMap open_;                     // those of them that nothing reserves
  std::optional<Relocation> relocation_;

  int64_t shared_ = 0, runs_ = 0, tentative_ = 0, moved_rows_ = 0, relocate_calls_ = 0;
  uint64_t digest_ = 0;
};

// Terms of the digest, which is their sum modulo 2^64, so that one change costs one addition. A slot with one
// reference adds nothing of its own: the table's entry says the same.
namespace pool_digest {

inline uint64_t Mix(uint64_t x) {  // the finalizer of SplitMix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
inline uint64_t Salt(SequenceId id) { return Mix(id + 0x9e3779b97f4a7c15u); }
inline uint64_t Entry(uint64_t salt, int64_t position, int32_t slot) {
  return Mix(salt ^ (static_cast<uint64_t>(position) << 32 | static_cast<uint32_t>(slot)));
}
inline uint64_t Length(uint64_t salt, int64_t committed) {
  return Mix(~salt + static_cast<uint64_t>(committed));
}
inline uint64_t References(int32_t slot, int32_t references) {
  if (references < 2) return 0;
  return Mix(0x2545f4914f6cdd1du ^ (static_cast<uint64_t>(slot) << 32 | static_cast<uint32_t>(references)));
}

}  // namespace pool_digest
}  // namespace kdt
