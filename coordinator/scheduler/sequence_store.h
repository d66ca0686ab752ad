// The sequences alive on the ranks: their slots, their operations for the next step, and the prefix cache.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "coordinator/group/group.h"
#include "coordinator/scheduler/prefix_cache.h"
#include "coordinator/scheduler/slot_ledger.h"
#include "kdt/v1/worker.pb.h"

namespace kdt {

// A running sequence whose committed tokens may be shared.
struct LiveSequence {
  uint64_t sequence_id = 0;
  std::span<const uint32_t> committed;
};

class SequenceStore {
 public:
  // A fork of fewer tokens costs more (a shared run, a table) than it saves.
  static constexpr size_t kMinSharedTokens = 8;

  // A new epoch: the ranks hold nothing.
  void Reset(const GroupLimits& limits);

  struct Started {
    uint64_t sequence_id = 0;
    uint32_t committed = 0;  // tokens taken over by a fork
  };
  // Creates a sequence for `tokens`, forked from the cached or live sequence with the longest common prefix
  // when `may_share`; at least the last token is left to compute. Call MakeSequenceRoom first.
  Started Start(std::span<const uint32_t> tokens, const v1::SamplingState& sampling, uint32_t expected_tokens,
                bool may_share, std::span<const LiveSequence> live);
  // How many tokens Start could take over from a live sequence.
  static uint32_t SharedWithLive(std::span<const uint32_t> tokens, std::span<const LiveSequence> live);

  void Commit(uint64_t id, uint32_t tokens) { ledger_.Append(id, tokens); }
  void Free(uint64_t id);
  // Keeps a finished sequence, whose K/V holds `tokens`, for later prompts.
  void Keep(uint64_t id, std::vector<uint32_t> tokens);

  // Evicts from the cache, oldest use first, until `slots` are free (or one more sequence may live). False
  // when the cache is empty before that.
  bool MakeRoom(uint64_t slots);
  bool MakeSequenceRoom();

  uint64_t free_slots() const { return ledger_.free(); }
  const SlotLedger& ledger() const { return ledger_; }
  // Moves the operations since the last call into the step, in order.
  void TakeOps(v1::StepRequest* request);

 private:
  struct Prefix {
    uint64_t sequence_id = 0;
    size_t length = 0;
  };
  Prefix FindPrefix(std::span<const uint32_t> tokens, std::span<const LiveSequence> live);

  SlotLedger ledger_;
  PrefixCache cache_;
  std::vector<v1::SequenceOp> ops_;
  uint32_t max_sequences_ = 0;
  uint64_t next_id_ = 1;  // never used again, in any epoch
};

}  // namespace kdt
