#include "worker/engine/engine_impl.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/status.h"
#include "kdt/v1/worker.pb.h"

namespace kdt {
namespace {

// Rows that live relocation may move before a step.
constexpr int64_t kRelocatedRowsAStep = 256;

constexpr double kNsPerUs = 1000;

float Micros(int64_t ns) { return static_cast<float>(static_cast<double>(ns) / kNsPerUs); }

// One round of a running 64-bit hash (multiply and fold, constants of splitmix64).
uint64_t Mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0xbf58476d1ce4e5b9u;
  hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebu;
  return hash ^ (hash >> 31);
}

// Adds what the collective waits between construction and destruction.
class WaitTimer {
 public:
  WaitTimer(const Collective& collective, int64_t* total)
      : collective_(collective), total_(total), before_(collective.wait_ns()) {}
  ~WaitTimer() { *total_ += collective_.wait_ns() - before_; }
  WaitTimer(const WaitTimer&) = delete;
  WaitTimer& operator=(const WaitTimer&) = delete;

 private:
  const Collective& collective_;
  int64_t* total_;
  const int64_t before_;
};

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

void EngineImpl::StartEpoch(Collective* collective) {
  pool_->Clear();
  sampling_.clear();
  collective_ = collective;
  last_step_ = 0;
  digest_ = 0;
}

absl::Status EngineImpl::Step(const v1::StepRequest& request, v1::StepResponse* response) {
  if (collective_ == nullptr) return absl::FailedPreconditionError("the engine is in no epoch");
  if (request.step() != last_step_ + 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("step is ", request.step(), ", expected ", last_step_ + 1));
  }
  times_ = {};
  int64_t total_ns = 0;
  const int64_t wait_before = collective_->wait_ns();
  int64_t sample_wait_ns = 0, draft_wait_ns = 0;
  {
    PhaseTimer timer(&total_ns);
    KDT_ASSIGN_OR_RETURN(const StepPlan plan, PlanStep(request, limits_, *pool_));
    collective_->SetDeadline(request.deadline_ms() == 0
                                 ? absl::InfiniteFuture()
                                 : absl::Now() + absl::Milliseconds(request.deadline_ms()));
    const std::span<const PlannedSequence> sequences = plan.sequences;
    KDT_RETURN_IF_ERROR(ApplyOps(plan.ops));
    KDT_RETURN_IF_ERROR(Move(pool_->Relocate(std::min(kRelocatedRowsAStep, limits_.max_rows))));
    outcomes_.assign(sequences.size(), {});
    drafts_.clear();
    if (!sequences.empty()) {
      KDT_RETURN_IF_ERROR(BeginRows(sequences));
      KDT_RETURN_IF_ERROR(Forward(sequences));
      {
        const WaitTimer wait(*collective_, &sample_wait_ns);
        PhaseTimer sample_timer(&times_.sample_ns);
        KDT_RETURN_IF_ERROR(Sample(sequences));
        KDT_RETURN_IF_ERROR(Walk(sequences));
        Decide(sequences);
        KDT_RETURN_IF_ERROR(Commit(sequences));
      }
      if (drafter_ != nullptr) {
        const WaitTimer wait(*collective_, &draft_wait_ns);
        PhaseTimer draft_timer(&times_.draft_ns);
        KDT_RETURN_IF_ERROR(Draft(sequences));
      }
    }
    KDT_RETURN_IF_ERROR(collective_->Finish(*backend_));
    last_step_ = request.step();
    UpdateDigest(sequences);
    Respond(sequences, response);
  }
  response->set_epoch(request.epoch());
  response->set_step(request.step());
  response->set_rank(options_.rank);
  v1::StepTimings* timings = response->mutable_timings();
  timings->set_total_us(Micros(total_ns));
  timings->set_forward_us(Micros(times_.forward_ns));
  timings->set_attention_us(Micros(times_.attention_ns));
  timings->set_moe_us(Micros(times_.moe_ns));
  timings->set_dense_us(Micros(times_.dense_ns));
  timings->set_sample_us(Micros(times_.sample_ns));
  timings->set_draft_us(Micros(times_.draft_ns));
  timings->set_collective_wait_us(Micros(collective_->wait_ns() - wait_before));
  timings->set_sample_wait_us(Micros(sample_wait_ns));
  timings->set_draft_wait_us(Micros(draft_wait_ns));
  return absl::OkStatus();
}

EngineStats EngineImpl::stats() const {
  EngineStats stats;
  stats.attention = attention_->errors();
  return stats;
}

absl::Status EngineImpl::ApplyOps(const std::vector<PlannedOp>& ops) {
  const int64_t vocab_begin = shard_.Begin(config_.vocab_size);
  const int64_t vocab_local = shard_.Count(config_.vocab_size);
  for (const PlannedOp& op : ops) {
    switch (op.kind) {
      case PlannedOp::Kind::kFree:
        KDT_RETURN_IF_ERROR(pool_->FreeSequence(op.id));
        sampling_.erase(op.id);
        break;
      case PlannedOp::Kind::kCreate:
        KDT_RETURN_IF_ERROR(pool_->CreateSequence(op.id, op.expected_tokens));
        sampling_.try_emplace(op.id, op.sampling, vocab_begin, vocab_local);
        break;
      case PlannedOp::Kind::kFork: {
        KDT_RETURN_IF_ERROR(pool_->ForkSequence(op.id, op.parent, op.length, op.expected_tokens));
        SequenceSampling forked(op.sampling, vocab_begin, vocab_local);
        forked.Append({sampling_.at(op.parent).tokens().data(), static_cast<size_t>(op.length)});
        sampling_.try_emplace(op.id, std::move(forked));
        break;
      }
    }
  }
  return absl::OkStatus();
}

absl::Status EngineImpl::BeginRows(std::span<const PlannedSequence> sequences) {
  for (size_t s = 0; s < sequences.size(); ++s) {
    const absl::Status begun = pool_->BeginRows(sequences[s].id, sequences[s].rows());
    if (begun.ok()) continue;
    // The coordinator counts slots, so this is its mistake; the sequences stay as they were.
    std::vector<SlotMove> none;
    for (size_t before = 0; before < s; ++before) {
      KDT_RETURN_IF_ERROR(pool_->Commit(sequences[before].id, {}, &none));
    }
    return begun;
  }
  return absl::OkStatus();
}

absl::Status EngineImpl::Forward(std::span<const PlannedSequence> sequences) {
  PhaseTimer timer(&times_.forward_ns);
  KDT_RETURN_IF_ERROR(batch_.Fill(sequences, *pool_));
  const auto hook = [this](int64_t layer, const kernels::Tensor& residual) -> absl::Status {
    if (options_.observer != nullptr) options_.observer->OnLayerOutput(layer, residual);
    return drafter_ == nullptr ? absl::OkStatus() : drafter_->OnLayerOutput(layer, residual);
  };
  attention_->BeginStep(last_step_ + 1);
  KDT_RETURN_IF_ERROR(forward_->Run(batch_.rows(), *collective_, hook, &times_));
  KDT_RETURN_IF_ERROR(attention_->EndStep());
  const int64_t count = static_cast<int64_t>(batch_.logit_rows().size());
  if (count == 0) return absl::OkStatus();
  const bool all = batch_.logit_rows().back() == count - 1;
  KDT_ASSIGN_OR_RETURN(logits_, forward_->Logits(batch_.device_logit_rows(), batch_.iota(), count, all));
  if (options_.observer != nullptr) options_.observer->OnLogits(logits_);
  return absl::OkStatus();
}

absl::Status EngineImpl::Sample(std::span<const PlannedSequence> sequences) {
  const size_t count = batch_.logit_rows().size();
  sampled_.clear();
  if (count == 0) return absl::OkStatus();
  sample_rows_.clear();
  paths_.clear();
  paths_.reserve(count);  // spans point into it
  for (const PlannedSequence& sequence : sequences) {
    const SequenceSampling& sampling = sampling_.at(sequence.id);
    const SamplingParams& params = sampling.params();
    const int64_t top = params.logprobs > 0 ? params.logprobs : -1;
    // Tokens of rows up to each node, root first. Needed by its children as well, so kept for the whole tree.
    const size_t first_path = paths_.size();
    for (int64_t i = 0; i < sequence.rows(); ++i) {
      if (!sequence.NeedsLogits(i)) continue;
      SampleRow row;
      const bool draws = sequence.tree || (sequence.sample && i + 1 == sequence.rows());
      if (!draws) {
        row.given = i + 1 < sequence.rows() ? sequence.tokens[i + 1] : sequence.next_token;
        row.top = sequence.prompt_logprobs;
      } else {
        row.sequence = &sampling;
        row.position = sequence.Position(i) + 1;
        row.top = top;
        if (params.Penalizes() && sequence.tree) {
          std::vector<int32_t> path;
          if (i > 0) path = paths_[first_path + sequence.parents[i]];
          path.push_back(sequence.tokens[i]);
          paths_.push_back(std::move(path));
          row.path = paths_.back();
        } else if (params.Penalizes()) {
          row.path = sequence.tokens;
        }
      }
      sample_rows_.push_back(row);
    }
  }
  return sampler_->Sample(logits_, sample_rows_, *collective_, &sampled_);
}

// All trees of the step: from the root along the nodes that carry their parent's drawn token.
absl::Status EngineImpl::Walk(std::span<const PlannedSequence> sequences) {
  int32_t* row_begin = walk_block_.host(walk_row_begin_);
  int64_t trees = 0;
  int64_t rows = 0;
  for (size_t s = 0; s < sequences.size(); ++s) {
    const PlannedSequence& sequence = sequences[s];
    if (!sequence.tree) continue;
    row_begin[trees++] = static_cast<int32_t>(rows);
    for (int64_t i = 0; i < sequence.rows(); ++i, ++rows) {
      const SampledRow& sampled = sampled_[batch_.logit_begin(s) + i];
      walk_block_.host(walk_tokens_)[rows] = sequence.tokens[i];
      walk_block_.host(walk_parents_)[rows] = sequence.parents[i];
      walk_block_.host(walk_targets_)[rows] = sampled.bad ? -1 : sampled.token;
    }
  }
  tree_path_.resize(rows);
  tree_path_length_.resize(trees);
  if (trees == 0) return absl::OkStatus();
  row_begin[trees] = static_cast<int32_t>(rows);
  KDT_RETURN_IF_ERROR(walk_block_.Upload());
  KDT_RETURN_IF_ERROR(
      backend_->TreeWalk({trees, walk_block_.device(walk_row_begin_), walk_block_.device(walk_tokens_),
                          walk_block_.device(walk_parents_), walk_block_.device(walk_targets_),
                          walk_block_.device(walk_path_length_), walk_block_.device(walk_path_),
                          walk_block_.device(walk_next_root_)}));
  KDT_RETURN_IF_ERROR(backend_->Download(tree_path_length_.data(), walk_block_.device(walk_path_length_),
                                         trees * sizeof(int32_t)));
  return backend_->Download(tree_path_.data(), walk_block_.device(walk_path_), rows * sizeof(int32_t));
}

// What is kept of each sequence. One whose own logits are not numbers keeps nothing; a bad node off the path
// is no fault, since plain decoding would never have come there.
void EngineImpl::Decide(std::span<const PlannedSequence> sequences) {
  int64_t tree = 0;
  int64_t tree_row = 0;
  for (size_t s = 0; s < sequences.size(); ++s) {
    const PlannedSequence& sequence = sequences[s];
    Outcome& outcome = outcomes_[s];
    const int64_t first = batch_.logit_begin(s);
    int64_t bad_position = -1;
    if (sequence.tree) {
      for (int32_t j = 0; j <= tree_path_length_[tree]; ++j) {
        const int32_t node = tree_path_[tree_row + j];
        const SampledRow& sampled = sampled_[first + node];
        outcome.kept.push_back(node);
        outcome.drawn.push_back(sampled.token);
        if (sampled.bad) bad_position = sequence.Position(node);
      }
      ++tree;
      tree_row += sequence.rows();
    } else {
      int64_t logit = first;
      for (int64_t i = 0; i < sequence.rows(); ++i) {
        outcome.kept.push_back(static_cast<int32_t>(i));
        if (!sequence.NeedsLogits(i)) continue;
        if (sampled_[logit].bad && bad_position < 0) bad_position = sequence.Position(i);
        if (sequence.sample && i + 1 == sequence.rows()) outcome.drawn.push_back(sampled_[logit].token);
        ++logit;
      }
    }
    if (bad_position < 0) continue;
    outcome.error =
        absl::StrCat("the logits at position ", bad_position,
                     " are not finite, or leave no token to draw: sequence ", sequence.id, " cannot go on");
    outcome.kept.clear();
    outcome.drawn.clear();
  }
}

absl::Status EngineImpl::Move(const std::vector<SlotMove>& moves) {
  KDT_CHECK(static_cast<int64_t>(moves.size()) <= limits_.max_rows);
  if (moves.empty()) return absl::OkStatus();
  for (size_t i = 0; i < moves.size(); ++i) {
    move_block_.host(move_from_)[i] = moves[i].from;
    move_block_.host(move_to_)[i] = moves[i].to;
  }
  KDT_RETURN_IF_ERROR(move_block_.Upload());
  const int64_t count = static_cast<int64_t>(moves.size());
  const int32_t* from = move_block_.device(move_from_);
  const int32_t* to = move_block_.device(move_to_);
  KDT_RETURN_IF_ERROR(backend_->KvMove({from, to, count, kv_.Layer(0), kv_.layers(), kv_.layer_stride()}));
  if (drafter_ == nullptr) return absl::OkStatus();
  return backend_->KvMove(
      {from, to, count, drafter_kv_.Layer(0), drafter_kv_.layers(), drafter_kv_.layer_stride()});
}

absl::Status EngineImpl::Commit(std::span<const PlannedSequence> sequences) {
  std::vector<SlotMove> moves;
  std::vector<int32_t> tokens;
  for (size_t s = 0; s < sequences.size(); ++s) {
    const PlannedSequence& sequence = sequences[s];
    KDT_RETURN_IF_ERROR(pool_->Commit(sequence.id, outcomes_[s].kept, &moves));
    tokens.clear();
    for (int32_t row : outcomes_[s].kept) tokens.push_back(sequence.tokens[row]);
    sampling_.at(sequence.id).Append(tokens);
  }
  return Move(moves);
}

absl::Status EngineImpl::Draft(std::span<const PlannedSequence> sequences) {
  std::vector<KeptRow> kept;
  std::vector<DraftRequest> requests;
  for (size_t s = 0; s < sequences.size(); ++s) {
    const PlannedSequence& sequence = sequences[s];
    const auto table = pool_->Table(sequence.id);
    for (size_t i = 0; i < outcomes_[s].kept.size(); ++i) {
      const int64_t position = sequence.start + static_cast<int64_t>(i);
      kept.push_back({static_cast<int32_t>(batch_.row_begin(s) + outcomes_[s].kept[i]),
                      static_cast<int32_t>(position), table[position]});
    }
    if (sequence.draft_top_k > 0 && outcomes_[s].error.empty()) {
      outcomes_[s].draft = static_cast<int64_t>(requests.size());
      requests.push_back({sequence.id, outcomes_[s].drawn.back(), sequence.draft_top_k});
    }
  }
  const bool all = static_cast<int64_t>(kept.size()) == batch_.rows().rows;
  KDT_RETURN_IF_ERROR(draft_step_->Append(kept, all, *collective_));
  return draft_step_->Draft(requests, *pool_, *collective_, &drafts_);
}

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
  response->set_expert_imbalance(forward_->ExpertImbalance());
  if (options_.rank != 0) return;
  for (size_t s = 0; s < sequences.size(); ++s) {
    const PlannedSequence& sequence = sequences[s];
    if (!sequence.tree && !sequence.sample && sequence.prompt_logprobs == 0) continue;
    FillResult(sequence, s, response->add_results());
  }
}

}  // namespace kdt
