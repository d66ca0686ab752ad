// What a step says of itself: its digest and its response.
#include <algorithm>

#include "kdt/v1/worker.pb.h"
#include "worker/engine/engine_impl.h"

namespace kdt {
namespace {

// One round of a running 64-bit hash (multiply and fold, constants of splitmix64).
uint64_t Mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0xbf58476d1ce4e5b9u;
  hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebu;
  return hash ^ (hash >> 31);
}

void FillLogprobs(const SampledRow& row, v1::PositionLogprobs* out) {
  out->mutable_token()->set_token_id(static_cast<uint32_t>(row.token));
  out->mutable_token()->set_logprob(row.logprob);
  for (const auto& [id, logprob] : row.top) {
    v1::TokenLogprob* entry = out->add_top();
    entry->set_token_id(static_cast<uint32_t>(id));
    entry->set_logprob(logprob);
  }
}

}  // namespace

void EngineImpl::UpdateDigest(std::span<const PlannedSequence> sequences) {
  digest_ = Mix(digest_, pool_->digest());
  for (size_t s = 0; s < sequences.size(); ++s) {
    digest_ = Mix(digest_, sequences[s].id);
    digest_ = Mix(digest_, outcomes_[s].error.empty() ? outcomes_[s].kept.size() : ~uint64_t{0});
    for (int32_t token : outcomes_[s].drawn) digest_ = Mix(digest_, static_cast<uint64_t>(token));
  }
}

void EngineImpl::FillResult(const PlannedSequence& sequence, size_t index, v1::SequenceResult* result) const {
  const Outcome& outcome = outcomes_[index];
  result->set_sequence_id(sequence.id);
  if (!outcome.error.empty()) {
    result->set_error(outcome.error);
    return;
  }
  for (int32_t token : outcome.drawn) result->add_tokens(static_cast<uint32_t>(token));
  const int64_t first = batch_.logit_begin(index);
  const bool logprobs = sampling_.at(sequence.id).params().logprobs > 0;
  if (sequence.tree) {
    for (size_t i = 0; i < outcome.kept.size(); ++i) {
      if (i > 0) result->add_accepted_nodes(static_cast<uint32_t>(outcome.kept[i]));
      if (logprobs) FillLogprobs(sampled_[first + outcome.kept[i]], result->add_logprobs());
    }
  } else {
    int64_t logit = first;
    for (int64_t i = 0; i < sequence.rows(); ++i) {
      if (!sequence.NeedsLogits(i)) continue;
      const SampledRow& row = sampled_[logit++];
      const bool drawn = sequence.sample && i + 1 == sequence.rows();
      if (!drawn) FillLogprobs(row, result->add_prompt_logprobs());
      if (drawn && logprobs) FillLogprobs(row, result->add_logprobs());
    }
  }
  if (outcome.draft < 0) return;
  const DraftCandidates& draft = drafts_[outcome.draft];
  // A drafter that went wrong costs speed, never the request.
  if (std::find(draft.bad.begin(), draft.bad.end(), 1) != draft.bad.end()) return;
  result->mutable_draft()->set_k(static_cast<uint32_t>(draft.k));
  result->mutable_draft()->mutable_token_ids()->Add(draft.ids.begin(), draft.ids.end());
  result->mutable_draft()->mutable_log_probs()->Add(draft.log_probs.begin(), draft.log_probs.end());
}

void EngineImpl::Respond(std::span<const PlannedSequence> sequences, v1::StepResponse* response) {
  response->Clear();
  response->set_digest(digest_);
  const KvPoolStats stats = pool_->stats();
  v1::PoolStats* pool = response->mutable_pool();
  pool->set_slots_used(stats.slots_used);
  pool->set_slots_shared(stats.slots_shared);
  pool->set_sequences(static_cast<uint32_t>(stats.sequences));
  pool->set_runs(static_cast<uint32_t>(stats.runs));
  pool->set_fragmentation(stats.fragmentation);
  pool->set_moved_bytes(static_cast<uint64_t>(stats.moved_rows) * SlotBytes());
  response->set_expert_imbalance(forward_->expert_load().Imbalance());
  response->set_expert_rank_imbalance(forward_->expert_load().RankImbalance());
  if (options_.rank != 0) return;
  for (size_t s = 0; s < sequences.size(); ++s) {
    const PlannedSequence& sequence = sequences[s];
    if (!sequence.tree && !sequence.sample && sequence.prompt_logprobs == 0) continue;
    FillResult(sequence, s, response->add_results());
  }
}

}  // namespace kdt
