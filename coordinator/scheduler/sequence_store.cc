#include "coordinator/scheduler/sequence_store.h"

#include <algorithm>
#include <utility>

namespace kdt {

void SequenceStore::Reset(const GroupLimits& limits) {
  cache_.Clear();
  ops_.clear();
  ledger_.Reset(limits.kv_slots);
  max_sequences_ = limits.max_sequences;
}

SequenceStore::Prefix SequenceStore::FindPrefix(std::span<const uint32_t> tokens,
                                                std::span<const LiveSequence> live) {
  const auto wanted = tokens.first(tokens.size() - 1);  // the last token's row gives the first draw
  const PrefixCache::Match cached = cache_.Find(wanted);
  Prefix best{cached.sequence_id, cached.length};
  for (const LiveSequence& sequence : live) {
    if (best.length == wanted.size()) break;
    const size_t common = CommonPrefix(sequence.committed, wanted);
    if (common > best.length) best = {sequence.sequence_id, common};
  }
  if (best.length < kMinSharedTokens) return {};
  return best;
}

uint32_t SequenceStore::SharedWithLive(std::span<const uint32_t> tokens, std::span<const LiveSequence> live) {
  size_t longest = 0;
  for (const LiveSequence& sequence : live)
    longest = std::max(longest, CommonPrefix(sequence.committed, tokens));
  return static_cast<uint32_t>(longest);
}

SequenceStore::Started SequenceStore::Start(std::span<const uint32_t> tokens,
                                            const v1::SamplingState& sampling, uint32_t expected_tokens,
                                            bool may_share, std::span<const LiveSequence> live) {
  const Prefix prefix = may_share ? FindPrefix(tokens, live) : Prefix{};
  const Started started{next_id_++, static_cast<uint32_t>(prefix.length)};
  v1::SequenceOp op;
  if (prefix.length == 0) {
    v1::CreateSequence* create = op.mutable_create();
    create->set_sequence_id(started.sequence_id);
    create->set_expected_tokens(expected_tokens);
    *create->mutable_sampling() = sampling;
    ledger_.Create(started.sequence_id);
  } else {
    v1::ForkSequence* fork = op.mutable_fork();
    fork->set_sequence_id(started.sequence_id);
    fork->set_parent_id(prefix.sequence_id);
    fork->set_length(started.committed);
    fork->set_expected_tokens(expected_tokens);
    *fork->mutable_sampling() = sampling;
    ledger_.Fork(started.sequence_id, prefix.sequence_id, started.committed);
  }
  ops_.push_back(std::move(op));
  return started;
}

void SequenceStore::Free(uint64_t id) {
  v1::SequenceOp op;
  op.mutable_free()->set_sequence_id(id);
  ops_.push_back(std::move(op));
  ledger_.Free(id);
}

void SequenceStore::Keep(uint64_t id, std::vector<uint32_t> tokens) {
  if (tokens.size() < kMinSharedTokens) {
    Free(id);
    return;
  }
  for (const uint64_t needless : cache_.Insert(id, std::move(tokens))) Free(needless);
}

bool SequenceStore::MakeRoom(uint64_t slots) {
  while (ledger_.free() < slots) {
    const auto evicted = cache_.Evict();
    if (!evicted.has_value()) return false;
    Free(*evicted);
  }
  return true;
}

bool SequenceStore::MakeSequenceRoom() {
  while (ledger_.sequences() >= max_sequences_) {
    const auto evicted = cache_.Evict();
    if (!evicted.has_value()) return false;
    Free(*evicted);
  }
  return true;
}

void SequenceStore::TakeOps(v1::StepRequest* request) {
  for (v1::SequenceOp& op : ops_) *request->add_ops() = std::move(op);
  ops_.clear();
}

}  // namespace kdt
