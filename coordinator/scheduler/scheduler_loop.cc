// The scheduler's thread: which samples run, one step after the other.
#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/log.h"
#include "common/status.h"
#include "coordinator/scheduler/scheduler.h"

namespace kdt {
namespace {

constexpr std::chrono::milliseconds kIdlePoll{50};  // how late a rank's death is seen while nothing runs
// While nothing runs, an empty step this often proves that every rank still answers.
constexpr int64_t kHeartbeatUs = 1'000'000;
constexpr int64_t kFormRetryUs = 500'000;
constexpr uint64_t kHeadroomTokens = 32;    // for each running sample
constexpr int64_t kPoolCountUs = 500'000;   // counting visits every running sample
constexpr uint32_t kExpectedAnswer = 1024;  // tokens to reserve neighbouring slots for

}  // namespace

void Scheduler::Run() {
  while (TakeCommands()) {
    const bool serves = GroupServes();
    Reap();
    UpdateCounts();
    if (serves) {
      Admit();
      builder_.Build(&running_, &step_, &plan_, &preempted_);
      metrics_.Preempted(preempted_.size());
      for (Sample* sample : preempted_) Enqueue(sample);
      preempted_.clear();
      UpdateCounts();
      const bool beat = MonotonicMicros() - last_sent_us_ >= kHeartbeatUs;
      if (!plan_.empty() || step_.ops_size() > 0 || beat) {
        RunStep();
        continue;
      }
      if (!gained_.empty()) {
        DeliverGains();
        continue;  // finished samples are still to be reaped
      }
      if (!group_->Poll().ok()) {
        LoseGroup();
        continue;
      }
    }
    WaitForWork();
  }
  EndAll(stop_why_);  // set before the loop ended, and no more
  const std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

bool Scheduler::TakeCommands() {
  std::vector<std::unique_ptr<Request>> arrived;
  std::vector<Cancellation> cancelled;
  {
    std::lock_guard lock(mutex_);
    if (stop_) return false;
    woken_ = false;
    arrived.swap(inbox_);
    cancelled.swap(cancellations_);
  }
  for (auto& request : arrived) Accept(std::move(request));
  for (const Cancellation& cancellation : cancelled) {
    const auto found = requests_.find(cancellation.id);
    if (found != requests_.end()) EndRequest(found->second.get(), cancellation.status);
  }
  if (lost_ && !requests_.empty()) EndAll(absl::UnavailableError(kGroupLost));
  return true;
}

bool Scheduler::stopping() const {
  const std::lock_guard lock(mutex_);
  return stop_;
}

void Scheduler::WaitForWork() {
  step_taken_us_ = 0;
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kIdlePoll, [this] { return woken_ || stop_; });
}

void Scheduler::Accept(std::unique_ptr<Request> request) {
  for (auto& sample : request->samples) Enqueue(sample.get());
  requests_.emplace(request->id, std::move(request));
}

void Scheduler::Enqueue(Sample* sample) {
  waiting_.insert(std::upper_bound(waiting_.begin(), waiting_.end(), sample, Senior), sample);
}

// The first token of a block is the root.
uint32_t Scheduler::DraftDepths() const {
  return limits_.draft_block_size > 0 ? limits_.draft_block_size - 1 : 0;
}

bool Scheduler::GroupServes() {
  if (lost_) return false;
  const GroupState state = group_->state();
  if (state == GroupState::kServing) {
    if (epoch_ == group_->epoch()) return true;
    epoch_ = group_->epoch();
    limits_ = group_->limits();
    store_.Reset(limits_);
    last_sent_us_ = MonotonicMicros();
    speculator_.Reset(limits_);
    builder_.Reset(limits_);
    metrics_.SetGroup(epoch_, group_->Ranks(), DraftDepths());
    CountPool(MonotonicMicros());
    return true;
  }
  if (state == GroupState::kDown) {
    if (!options_.rejoin) {
      LoseGroup();
    } else if (MonotonicMicros() >= retry_forming_us_) {
      retry_forming_us_ = MonotonicMicros() + kFormRetryUs;
      group_->Form();
    }
  }
  return false;
}

// Every sample's K/V is gone. With rejoin they wait for the next epoch, to be prefilled with what they have;
// tokens of the step that failed were never seen, so none is repeated or missing.
void Scheduler::LoseGroup() {
  DeliverGains();
  for (Sample* sample : running_) {
    sample->sequence_id = 0;
    sample->committed = 0;
    sample->draft.Clear();
    if (sample->state != SampleState::kRunning) continue;
    sample->state = SampleState::kWaiting;
    Enqueue(sample);
  }
  running_.clear();
  metrics_.SetGroup(group_->epoch(), group_->Ranks(), DraftDepths());
  epoch_ = 0;
  if (!options_.rejoin && !stopping()) {
    lost_ = true;
    if (options_.on_group_lost) options_.on_group_lost(group_->reason());
    EndAll(absl::UnavailableError(kGroupLost));
  }
  UpdateCounts();
}

// Samples that ended give their sequence to the prefix cache, or free it; ended requests are forgotten.
void Scheduler::Reap() {
  std::erase_if(gained_, [](const Gained& gained) { return gained.sample->request->ended; });
  std::erase_if(running_, [this](Sample* sample) {
    if (sample->state != SampleState::kDone) return false;
    if (sample->sequence_id != 0) {
      if (sample->keep_sequence) {
        sample->tokens.resize(sample->committed);
        store_.Keep(sample->sequence_id, std::move(sample->tokens));
      } else {
        store_.Free(sample->sequence_id);
      }
      sample->sequence_id = 0;
    }
    return true;
  });
  std::erase_if(waiting_, [](const Sample* sample) { return sample->state == SampleState::kDone; });
  std::erase_if(requests_, [](const auto& entry) { return entry.second->ended; });
}

void Scheduler::UpdateCounts() {
  uint32_t waiting = 0;
  for (const auto& [id, request] : requests_) {
    waiting += !request->ended && request->samples.front()->admitted_us == 0;
  }
  const auto running = static_cast<uint32_t>(running_.size());
  const auto held =
      static_cast<uint32_t>(std::count_if(waiting_.begin(), waiting_.end(), [](const Sample* sample) {
        return sample->state == SampleState::kWaiting && sample->admitted_us != 0;
      }));
  {
    std::lock_guard lock(mutex_);
    waiting += static_cast<uint32_t>(inbox_.size());
    const size_t open = requests_.size() + inbox_.size();
    if (waiting == waiting_count_ && running == running_count_ && held == held_count_ &&
        open == open_requests_) {
      return;
    }
    waiting_count_ = waiting;
    running_count_ = running;
    held_count_ = held;
    open_requests_ = open;
  }
  metrics_.SetLoad(running, held, waiting);
  changed_.notify_all();  // Drain() may be waiting
}

std::vector<LiveSequence> Scheduler::Live() const {
  std::vector<LiveSequence> live;
  for (const Sample* sample : running_) {
    live.push_back({sample->sequence_id, std::span(sample->tokens).first(sample->committed)});
  }
  return live;
}

// The other samples of a request wait until the first has computed the prompt that they share.
bool Scheduler::MayStart(const Sample& sample) const {
  if (sample.index == 0) return true;
  const Request& request = *sample.request;
  const Sample& first = *request.samples.front();
  const auto shared = static_cast<uint32_t>(request.spec.prompt.size()) - 1;
  if (request.spec.prompt_logprobs > 0 && request.prompt_logprobs.size() < shared) return false;
  return first.state == SampleState::kDone || first.committed >= shared;
}

// Admission looks at what the running samples hold and have yet to prefill, not at what answers may grow to:
// a worst case of a whole context for each would leave most of the pool idle. When answers do outgrow it,
// juniors are preempted.
bool Scheduler::HasRoomFor(const Sample& sample, const std::vector<LiveSequence>& live) const {
  std::vector<uint64_t> ids;
  uint64_t claimed = 0;
  for (const Sample* running : running_) {
    ids.push_back(running->sequence_id);
    claimed += running->pending();
  }
  claimed += store_.ledger().HeldBy(ids);
  const uint64_t slots = store_.ledger().slots();
  const uint64_t available = slots - std::min(slots, claimed);
  // Room to grow for a while, or whoever is admitted would be preempted again at once.
  const uint64_t needed = sample.tokens.size() + kHeadroomTokens * (running_.size() + 1);
  return needed <= available || needed - SequenceStore::SharedWithLive(sample.tokens, live) <= available;
}

void Scheduler::Admit() {
  if (waiting_.empty()) return;
  const size_t most = std::min(options_.max_running, limits_.max_rows);
  for (size_t i = 0; i < waiting_.size() && running_.size() < most;) {
    Sample* sample = waiting_[i];
    if (!MayStart(*sample)) {
      ++i;
      continue;
    }
    const std::vector<LiveSequence> live = Live();
    if (!running_.empty() && !HasRoomFor(*sample, live)) return;
    if (!store_.MakeSequenceRoom()) return;
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
    StartSample(sample, live);
  }
}

void Scheduler::StartSample(Sample* sample, const std::vector<LiveSequence>& live) {
  Request& request = *sample->request;
  const RequestSpec& spec = request.spec;
  v1::SamplingState sampling = spec.sampling;
  sampling.set_seed(spec.sampling.seed() + sample->index);
  const uint32_t expected = static_cast<uint32_t>(sample->tokens.size()) +
                            std::min(spec.max_tokens - sample->kept, kExpectedAnswer);
  // Log-probabilities of the prompt need every row of it to be computed.
  const bool needs_rows = sample->index == 0 && spec.prompt_logprobs > 0 &&
                          request.prompt_logprobs.size() + 1 < spec.prompt.size();
  const auto started = store_.Start(sample->tokens, sampling, expected, !needs_rows, live);
  sample->sequence_id = started.sequence_id;
  sample->committed = started.committed;
  sample->state = SampleState::kRunning;
  if (sample->admitted_us == 0) {
    sample->admitted_us = MonotonicMicros();
    if (sample->index == 0) request.cached_tokens = started.committed;
  }
  running_.insert(std::upper_bound(running_.begin(), running_.end(), sample, Senior), sample);
}

void Scheduler::RunStep() {
  last_sent_us_ = MonotonicMicros();
  const absl::Status sent = group_->Send(&step_);
  DeliverGains();  // the last step's texts, while the ranks compute
  const absl::Status received = sent.ok() ? group_->Receive(&answer_) : sent;
  if (!received.ok()) {
    LoseGroup();
    return;
  }
  const absl::Status applied =
      ApplyStep(plan_, &answer_, options_.vocab_size, &store_, &speculator_, &gained_);
  if (!applied.ok()) {
    gained_.clear();
    group_->Reject(std::string(applied.message()));
    LoseGroup();
    return;
  }
  if (const int64_t now_us = MonotonicMicros(); now_us - pool_counted_us_ >= kPoolCountUs) CountPool(now_us);
  CheckSlotCount();
  if (plan_.empty()) return;
  metrics_.StepDone(group_->last_cost());
  if (speculator_.decision().total_nodes > 0) metrics_.TreesBuilt(speculator_.last_build_us() * 1e-6);
  const int64_t now_us = MonotonicMicros();
  // While steps follow one another, a step costs what passes from one answer to the next, this side's work
  // included: that is what a token more saves.
  const double step_us =
      step_taken_us_ > 0 ? static_cast<double>(now_us - step_taken_us_) : group_->last_cost().round_trip_us;
  step_taken_us_ = now_us;
  speculator_.ObserveStep(step_us, answer_.timings().draft_us());
  for (Gained& gained : gained_) {
    Sample* sample = gained.sample;
    gained.first = sample->first_token_us == 0;
    gained.gap_s =
        SecondsBetween(gained.first ? sample->request->submitted_us : sample->last_token_us, now_us);
    if (gained.first) sample->first_token_us = now_us;
    sample->last_token_us = now_us;
    if (gained.finish != v1::FINISH_REASON_UNSPECIFIED || !gained.error.empty()) {
      sample->state = SampleState::kDone;
      sample->keep_sequence = gained.error.empty();
    }
  }
}

void Scheduler::CountPool(int64_t now_us) {
  pool_counted_us_ = now_us;
  std::vector<uint64_t> running;
  for (const Sample* sample : running_) {
    if (sample->sequence_id != 0) running.push_back(sample->sequence_id);
  }
  const SlotLedger& ledger = store_.ledger();
  const uint64_t held = ledger.HeldBy(running);
  metrics_.SetPool(held, ledger.used() - held, ledger.free());
}

// Admission and preemption rest on the mirror of the ranks' pools; a difference would be a fault of this
// program. A sequence that the ranks failed may hold rows or not until it is freed.
void Scheduler::CheckSlotCount() {
  const bool failed =
      std::any_of(gained_.begin(), gained_.end(), [](const Gained& g) { return !g.error.empty(); });
  if (failed) return;
  const int64_t difference =
      static_cast<int64_t>(answer_.pool().slots_used()) - static_cast<int64_t>(store_.ledger().used());
  const bool told = difference == slot_difference_;
  slot_difference_ = difference;
  if (difference == 0) return;
  metrics_.SlotCountDiffered();
  if (told) return;  // counted at each step, written down when it changes
  spdlog::error("step {}: {} KV slots are in use on rank 0, {} by the coordinator's count", answer_.step(),
                answer_.pool().slots_used(), store_.ledger().used());
}

}  // namespace kdt
