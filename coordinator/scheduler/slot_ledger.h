// Counts the KV slots that sequences hold, shared ones once: the coordinator's mirror of every rank's pool.
//
// Sequences form a tree of segments: a fork shares its parent's first tokens, and a segment's slots are free
// when no sequence reaches it any more. The count equals PoolStats.slots_used between steps.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>

namespace kdt {

class SlotLedger {
 public:
  // Forgets all sequences; `slots` is the pool's size.
  void Reset(uint64_t slots);

  void Create(uint64_t id);
  // length: 1 .. parent's length.
  void Fork(uint64_t id, uint64_t parent, uint32_t length);
  void Free(uint64_t id);
  void Append(uint64_t id, uint32_t tokens);

  uint64_t slots() const { return slots_; }
  uint64_t used() const { return used_; }
  uint64_t free() const { return slots_ - used_; }
  size_t sequences() const { return tails_.size(); }
  // Distinct slots that these sequences hold together.
  uint64_t HeldBy(std::span<const uint64_t> ids) const;

 private:
  struct Segment {
    Segment(SlotLedger* owner, std::shared_ptr<Segment> before, uint32_t from)
        : ledger(owner), parent(std::move(before)), begin(from) {}
    ~Segment() { ledger->used_ -= length; }
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;

    SlotLedger* ledger;
    std::shared_ptr<Segment> parent;
    uint32_t begin;  // position of its first token
    uint32_t length = 0;
  };

  uint64_t slots_ = 0;
  uint64_t used_ = 0;
  // The last segment of a sequence belongs to it alone, so that it can grow.
  std::unordered_map<uint64_t, std::shared_ptr<Segment>> tails_;
};

}  // namespace kdt
