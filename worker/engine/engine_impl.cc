#include "worker/engine/engine_impl.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/status.h"
#include "kdt/kernels/tree_walk.h"
#include "kdt/v1/worker.pb.h"

namespace kdt {
namespace {

// Rows that live relocation may move before a step.
constexpr int64_t kRelocatedRowsAStep = 256;

constexpr uint64_t kCountExpertsEvery = 16;  // steps

constexpr double kNsPerUs = 1000;

float Micros(int64_t ns) { return static_cast<float>(static_cast<double>(ns) / kNsPerUs); }

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

}  // namespace

absl::Status EngineImpl::Step(const v1::StepRequest& request, v1::StepResponse* response) {
  if (collective_ == nullptr) return absl::FailedPreconditionError("the engine is in no epoch");
  if (request.step() != last_step_ + 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("step is ", request.step(), ", expected ", last_step_ + 1));
  }
  times_ = {};
  device_idle_ = false;
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
    KDT_RETURN_IF_ERROR(Relocate());
    outcomes_.assign(sequences.size(), {});
    drafts_.clear();
    if (!sequences.empty()) {
      KDT_RETURN_IF_ERROR(BeginRows(sequences));
      KDT_RETURN_IF_ERROR(Forward(sequences));
      {
        const WaitTimer wait(*collective_, &sample_wait_ns);
        PhaseTimer sample_timer(&times_.sample_ns);
        KDT_RETURN_IF_ERROR(Sample());
        Walk(sequences);
        Decide(sequences);
        KDT_RETURN_IF_ERROR(Commit(sequences));
      }
      const WaitTimer wait(*collective_, &draft_wait_ns);
      PhaseTimer draft_timer(&times_.draft_ns);
      KDT_RETURN_IF_ERROR(Draft());
    }
    // Nothing may be behind the draw: no row to move, and no draft.
    if (!device_idle_) KDT_RETURN_IF_ERROR(collective_->Finish(*backend_));
    MergeDrafts();
    if (!sequences.empty() && CountsExperts()) forward_->CountExperts(shape_.rows);
    EndStep();
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

// Where the host is not the device it counts beside other work: a sample of the steps is enough.
bool EngineImpl::CountsExperts() const {
  return !graphs_->captures() || (last_step_ + 1) % kCountExpertsEvery == 0;
}

absl::Status EngineImpl::ApplyOps(const std::vector<PlannedOp>& ops) {
  const int64_t vocab_begin = shard_.Begin(config_.vocab_size);
  const int64_t vocab_local = shard_.Count(config_.vocab_size);
  for (const PlannedOp& op : ops) {
    switch (op.kind) {
      case PlannedOp::Kind::kFree:
        KDT_RETURN_IF_ERROR(pool_->FreeSequence(op.id));
        ForgetTables();  // the id may come again
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
  const StepBatch::Counts counts = StepBatch::Count(sequences);
  shape_.rows = graphs_->Rows(counts.rows);
  shape_.sequences = graphs_->Sequences(static_cast<int64_t>(sequences.size()), shape_.rows);
  shape_.logit_rows = counts.logit_rows == 0 ? 0 : graphs_->Rows(counts.logit_rows);
  KDT_RETURN_IF_ERROR(batch_.Fill(sequences, *pool_, shape_.rows, shape_.sequences, shape_.logit_rows));
  FillSampleRows(sequences);
  const auto forward = [this] { return ForwardOps(shape_.rows, shape_.sequences); };
  // A validated step's ops are not those of the graph.
  KDT_RETURN_IF_ERROR(attention_->BeginStep(last_step_ + 1)
                          ? forward()
                          : graphs_->Run(StepPiece::kForward, shape_.rows, shape_.sequences, forward));
  KDT_RETURN_IF_ERROR(attention_->EndStep());
  if (shape_.logit_rows > 0) {
    KDT_RETURN_IF_ERROR(graphs_->Run(StepPiece::kLogits, shape_.logit_rows, 0,
                                     [this] { return LogitsOps(shape_.logit_rows, draws_by_argmax_); }));
  }
  if (CountsExperts()) KDT_RETURN_IF_ERROR(forward_->QueueExperts(shape_.rows));
  if (shape_.logit_rows == 0) return absl::OkStatus();
  KDT_RETURN_IF_ERROR(collective_->Finish(*backend_));
  device_idle_ = draws_by_argmax_;
  return absl::OkStatus();
}

// What every logit row is asked, and the keys of its draw where the device can make it.
void EngineImpl::FillSampleRows(std::span<const PlannedSequence> sequences) {
  sample_rows_.clear();
  paths_.clear();
  paths_.reserve(batch_.logit_rows());  // spans point into it
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
  draws_by_argmax_ = std::all_of(sample_rows_.begin(), sample_rows_.end(), DrawsByArgmax);
  for (size_t i = 0; i < sample_rows_.size(); ++i) {
    const SampleRow& row = sample_rows_[i];
    if (draws_by_argmax_) {
      const SamplingParams& params = row.sequence->params();
      batch_.SetDraw(static_cast<int64_t>(i), params.temperature, params.seed, row.position);
    } else {
      batch_.SetDraw(static_cast<int64_t>(i), 0, 0, 0);
    }
  }
}

absl::Status EngineImpl::Sample() {
  sampled_.clear();
  if (batch_.logit_rows() == 0) return absl::OkStatus();
  if (draws_by_argmax_) {
    argmax_draw_->Merge(shape_.logit_rows, batch_.logit_rows(), &sampled_);
    return absl::OkStatus();
  }
  // The general way copies logits and records through pageable memory.
  ++general_draws_;
  backend_->Seal(false);
  const absl::Status status =
      sampler_->Sample(forward_->logits(batch_.logit_rows()), sample_rows_, *collective_, &sampled_);
  backend_->Seal(options_.strict);
  return status;
}

// All trees of the step. A few hundred nodes cost the host less than the launch of the op TreeWalk would.
void EngineImpl::Walk(std::span<const PlannedSequence> sequences) {
  for (size_t s = 0; s < sequences.size(); ++s) {
    const PlannedSequence& sequence = sequences[s];
    if (!sequence.tree) continue;
    const SampledRow* const sampled = sampled_.data() + batch_.logit_begin(s);
    // A bad node ends the path.
    const auto target = [sampled](int32_t node) { return sampled[node].bad ? -1 : sampled[node].token; };
    std::vector<int32_t>& path = outcomes_[s].kept;
    path.resize(sequence.rows());
    const int32_t accepted = kernels::WalkTree(static_cast<int32_t>(sequence.rows()), sequence.tokens.data(),
                                               sequence.parents.data(), target, path.data());
    path.resize(accepted + 1);
  }
}

// What is kept of each sequence. One whose own logits are not numbers keeps nothing; a bad node off the path
// is no fault, since plain decoding would never have come there.
void EngineImpl::Decide(std::span<const PlannedSequence> sequences) {
  for (size_t s = 0; s < sequences.size(); ++s) {
    const PlannedSequence& sequence = sequences[s];
    Outcome& outcome = outcomes_[s];
    const int64_t first = batch_.logit_begin(s);
    int64_t bad_position = -1;
    if (sequence.tree) {
      for (const int32_t node : outcome.kept) {
        const SampledRow& sampled = sampled_[first + node];
        outcome.drawn.push_back(sampled.token);
        if (sampled.bad) bad_position = sequence.Position(node);
      }
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

// Live relocation, ahead of the step's rows: rare, so it is launched op by op.
absl::Status EngineImpl::Relocate() {
  const std::vector<SlotMove> moves = pool_->Relocate(std::min(kRelocatedRowsAStep, limits_.max_rows));
  if (moves.empty()) return absl::OkStatus();
  ForgetTables();
  for (size_t i = 0; i < moves.size(); ++i) {
    relocation_block_.host(relocation_from_)[i] = moves[i].from;
    relocation_block_.host(relocation_to_)[i] = moves[i].to;
  }
  KDT_RETURN_IF_ERROR(relocation_block_.Upload());
  const auto count = static_cast<int64_t>(moves.size());
  const int32_t* from = relocation_block_.device(relocation_from_);
  const int32_t* to = relocation_block_.device(relocation_to_);
  KDT_RETURN_IF_ERROR(backend_->KvMove({from, to, count, kv_.Layer(0), kv_.layers(), kv_.layer_stride()}));
  if (drafter_ == nullptr) return absl::OkStatus();
  return backend_->KvMove(
      {from, to, count, drafter_kv_.Layer(0), drafter_kv_.layers(), drafter_kv_.layer_stride()});
}

absl::Status EngineImpl::Commit(std::span<const PlannedSequence> sequences) {
  moves_.clear();
  kept_.clear();
  requests_.clear();
  std::vector<int32_t> tokens;
  for (size_t s = 0; s < sequences.size(); ++s) {
    const PlannedSequence& sequence = sequences[s];
    Outcome& outcome = outcomes_[s];
    KDT_RETURN_IF_ERROR(pool_->Commit(sequence.id, outcome.kept, &moves_));
    tokens.clear();
    for (int32_t row : outcome.kept) tokens.push_back(sequence.tokens[row]);
    sampling_.at(sequence.id).Append(tokens);
    if (drafter_ == nullptr) continue;
    int64_t request = -1;
    if (sequence.draft_top_k > 0 && outcome.error.empty()) {
      outcome.draft = static_cast<int64_t>(requests_.size());
      if (outcome.draft < draft_step_->max_sequences()) request = outcome.draft;
      requests_.push_back({sequence.id, outcome.drawn.back(), sequence.draft_top_k, sequence.start});
    }
    const auto table = pool_->Table(sequence.id);
    for (size_t i = 0; i < outcome.kept.size(); ++i) {
      const int64_t position = sequence.start + static_cast<int64_t>(i);
      kept_.push_back({static_cast<int32_t>(batch_.row_begin(s) + outcome.kept[i]),
                       static_cast<int32_t>(position), table[position], request});
    }
  }
  return absl::OkStatus();
}

// What is kept moves to its place, the drafter takes it in, and drafts. The last pass's results are merged
// when the step is finished.
absl::Status EngineImpl::Draft() {
  // Without a drafter there is only what moves: with a chain, and with a tree of which no node was accepted,
  // nothing.
  const auto count = static_cast<int64_t>(std::max(moves_.size(), drafter_ == nullptr ? 0 : kept_.size()));
  if (count > 0) {
    device_idle_ = false;
    const int64_t rows = graphs_->Rows(count);
    for (int64_t i = 0; i < rows; ++i) {
      const bool real = i < static_cast<int64_t>(moves_.size());
      move_block_.host(move_from_)[i] = real ? moves_[i].from : 0;
      move_block_.host(move_to_)[i] = real ? moves_[i].to : 0;
    }
    if (drafter_ != nullptr) draft_step_->FillKept(kept_, rows);
    KDT_RETURN_IF_ERROR(graphs_->Run(StepPiece::kKept, rows, 0, [this, rows] { return KeptOps(rows); }));
  }
  pending_ = {};
  if (drafter_ == nullptr) return absl::OkStatus();
  const std::span<const DraftRequest> requests = requests_;
  const auto most = static_cast<size_t>(draft_step_->max_sequences());
  for (size_t begin = 0; begin < requests.size(); begin += most) {
    if (begin > 0) {
      KDT_RETURN_IF_ERROR(collective_->Finish(*backend_));
      MergeDrafts();
    }
    device_idle_ = false;
    pending_.requests = requests.subspan(begin, std::min(most, requests.size() - begin));
    pending_.sequences = DraftShape(static_cast<int64_t>(pending_.requests.size()));
    pending_.top_k = DraftTopKShape(pending_.requests);
    KDT_RETURN_IF_ERROR(draft_step_->FillDraft(pending_.requests, *pool_, pending_.sequences, begin == 0));
    KDT_RETURN_IF_ERROR(graphs_->Run(StepPiece::kDraft, pending_.sequences, 0, [this] {
      return draft_step_->DraftOps(pending_.sequences, pending_.top_k, *collective_);
    }));
  }
  return absl::OkStatus();
}

void EngineImpl::MergeDrafts() {
  if (!pending_.requests.empty()) {
    draft_step_->Merge(pending_.requests, pending_.sequences, pending_.top_k, &drafts_);
  }
  pending_ = {};
}

void EngineImpl::EndStep() {
  batch_.tables().EndStep();
  if (draft_step_ != nullptr) draft_step_->tables().EndStep();
}

void EngineImpl::ForgetTables() {
  batch_.tables().Forget();
  if (draft_step_ != nullptr) draft_step_->tables().Forget();
}

}  // namespace kdt
