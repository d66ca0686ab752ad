#include "coordinator/scheduler/slot_ledger.h"

#include <unordered_set>

#include "common/status.h"

namespace kdt {

void SlotLedger::Reset(uint64_t slots) {
  tails_.clear();
  KDT_CHECK(used_ == 0);
  slots_ = slots;
}

void SlotLedger::Create(uint64_t id) {
  KDT_CHECK(tails_.emplace(id, std::make_shared<Segment>(this, nullptr, 0)).second);
}

void SlotLedger::Fork(uint64_t id, uint64_t parent, uint32_t length) {
  const auto found = tails_.find(parent);
  KDT_CHECK(found != tails_.end() && length > 0);
  std::shared_ptr<Segment>& tail = found->second;
  KDT_CHECK(length <= tail->begin + tail->length);
  std::shared_ptr<Segment> shared;
  if (length > tail->begin && length == tail->begin + tail->length) {
    // The whole tail is shared: it stops growing, and the parent goes on in a new one.
    shared = tail;
    tail = std::make_shared<Segment>(this, shared, length);
  } else {
    Segment* segment = tail.get();
    std::shared_ptr<Segment>* holder = &tail;
    while (length <= segment->begin) {
      holder = &segment->parent;
      segment = holder->get();
    }
    if (length == segment->begin + segment->length) {
      shared = *holder;
    } else {
      // Split: the front part becomes a segment of its own, so that its end can be shared.
      const uint32_t front = length - segment->begin;
      shared = std::make_shared<Segment>(this, segment->parent, segment->begin);
      shared->length = front;
      segment->parent = shared;
      segment->begin += front;
      segment->length -= front;
    }
  }
  KDT_CHECK(tails_.emplace(id, std::make_shared<Segment>(this, std::move(shared), length)).second);
}

void SlotLedger::Free(uint64_t id) { KDT_CHECK(tails_.erase(id) == 1); }

void SlotLedger::Append(uint64_t id, uint32_t tokens) {
  const auto found = tails_.find(id);
  KDT_CHECK(found != tails_.end());
  found->second->length += tokens;
  used_ += tokens;
  KDT_CHECK(used_ <= slots_);
}

uint64_t SlotLedger::HeldBy(std::span<const uint64_t> ids) const {
  std::unordered_set<const Segment*> seen;
  uint64_t held = 0;
  for (const uint64_t id : ids) {
    const auto found = tails_.find(id);
    KDT_CHECK(found != tails_.end());
    for (const Segment* segment = found->second.get(); segment != nullptr; segment = segment->parent.get()) {
      if (!seen.insert(segment).second) break;
      held += segment->length;
    }
  }
  return held;
}

}  // namespace kdt
