#include "coordinator/group/rank_group.h"

#include <grpc/support/time.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/log.h"
#include "common/status.h"

namespace kdt {
namespace {

// After a first failure: time for the cause to show, so that the rank that died is named and not one that
// missed it.
constexpr int64_t kCulpritGraceUs = 300'000;
// Waiting on one queue, the other is looked at this often.
constexpr int64_t kSliceUs = 10'000;

// The rank's own time-out lies before ours: it can still tell which peer it waited for.
int RankTimeoutMs(int step_timeout_ms) { return std::max(1, step_timeout_ms * 4 / 5); }

}  // namespace

RankGroup::RankGroup(RankGroupOptions options)
    : options_(std::move(options)),
      former_(links_, options_.forming,
              {[this](const std::string& waiting) {
                 const std::lock_guard lock(mutex_);
                 reason_ = waiting;
               },
               [this](uint32_t rank, const RankPoll::Heard& heard) {
                 const std::lock_guard lock(mutex_);
                 status_[rank].up = heard.ready();
                 if (heard.asked) gone_[rank] = heard.gone();
                 if (!heard.answered) return;
                 status_[rank].backend = heard.description.backend();
                 status_[rank].device = heard.description.device();
               },
               [this](uint32_t rank, const std::string& error) {
                 const std::lock_guard lock(mutex_);
                 status_[rank].last_error = error;
               }}) {
  KDT_CHECK(!options_.addresses.empty());
  for (size_t i = 0; i < options_.addresses.size(); ++i) {
    links_.push_back(
        std::make_unique<RankLink>(static_cast<uint32_t>(i), options_.addresses[i], options_.security));
    RankStatus status;
    status.rank = static_cast<uint32_t>(i);
    status.address = options_.addresses[i];
    status_.push_back(status);
  }
  gone_.resize(links_.size());
}

RankGroup::~RankGroup() {
  stopping_ = true;
  if (forming_.joinable()) forming_.join();
  CloseStreams();
  for (grpc::CompletionQueue* queue : {&queue_, &peers_queue_}) {
    queue->Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue->Next(&tag, &ok)) {
    }
  }
}

GroupState RankGroup::state() const {
  std::lock_guard lock(mutex_);
  return state_;
}

std::string RankGroup::reason() const {
  std::lock_guard lock(mutex_);
  return reason_;
}

uint64_t RankGroup::epoch() const {
  std::lock_guard lock(mutex_);
  return epoch_;
}

GroupLimits RankGroup::limits() const {
  std::lock_guard lock(mutex_);
  return limits_;
}

std::vector<RankStatus> RankGroup::Ranks() const {
  std::lock_guard lock(mutex_);
  std::vector<RankStatus> ranks = status_;
  const auto age_us = static_cast<double>(MonotonicMicros() - formed_us_);
  for (RankStatus& rank : ranks) rank.busy_ratio = age_us > 0 ? std::min(1.0, rank.busy_ratio / age_us) : 0;
  return ranks;
}

bool RankGroup::MayServeSoon() const {
  std::lock_guard lock(mutex_);
  return state_ == GroupState::kServing || std::find(gone_.begin(), gone_.end(), true) == gone_.end();
}

void RankGroup::SetState(GroupState state, const std::string& reason) {
  {
    std::lock_guard lock(mutex_);
    state_ = state;
    reason_ = reason;
  }
  if (options_.on_change) options_.on_change();
}

void RankGroup::Form() {
  KDT_CHECK(state() == GroupState::kDown);
  if (forming_.joinable()) forming_.join();
  SetState(GroupState::kJoining, "the ranks are loading");
  forming_ = std::thread([this] { RunForming(); });
}

void RankGroup::RunForming() {
  const auto formed = former_.Form(epoch(), [this] { return stopping_.load(); });
  if (!formed.ok()) {
    const std::string why(formed.status().message());
    // It is tried again twice a second, and the ranks may give different reasons in turn.
    if (!stopping_ && did_not_form_.Due(why, MonotonicMicros())) {
      const int untold = did_not_form_.TakeUntold();
      spdlog::error("the group did not form: {}{}", why,
                    untold > 0 ? absl::StrCat(" (", untold, " more attempts since the last such line)") : "");
    }
    SetState(GroupState::kDown, why);
    return;
  }
  progress_.Begin(links_.size());
  for (auto& link : links_) link->OpenStream(link->rank() == 0 ? &queue_ : &peers_queue_);
  {
    std::lock_guard lock(mutex_);
    epoch_ = formed->epoch;
    limits_ = formed->limits;
    formed_us_ = MonotonicMicros();
    for (size_t i = 0; i < status_.size(); ++i) {
      status_[i].backend = formed->ranks[i].backend();
      status_[i].device = formed->ranks[i].device();
      status_[i].kv_slots_total = formed->ranks[i].kv_slots_total();
      status_[i].kv_slots_used = 0;
      status_[i].steps = 0;
      status_[i].busy_ratio = 0;
      status_[i].up = true;
    }
  }
  did_not_form_.Forget();
  spdlog::info("the group serves: epoch {}, {} ranks, {} KV slots, {} rows a step", formed->epoch,
               links_.size(), formed->limits.kv_slots, formed->limits.max_rows);
  SetState(GroupState::kServing, "");
}

bool RankGroup::PumpOne(grpc::CompletionQueue* queue, int64_t deadline_us) {
  void* tag = nullptr;
  bool ok = false;
  // gRPC rounds deadlines up to milliseconds: only one that lies in the past does not wait.
  gpr_timespec deadline = gpr_inf_past(GPR_CLOCK_REALTIME);
  if (const int64_t wait_us = deadline_us - MonotonicMicros(); wait_us > 0) {
    deadline = gpr_time_add(gpr_now(GPR_CLOCK_REALTIME), gpr_time_from_micros(wait_us, GPR_TIMESPAN));
  }
  if (queue->AsyncNext(&tag, &ok, deadline) != grpc::CompletionQueue::GOT_EVENT) return false;
  const auto* event = static_cast<const RankLink::Tag*>(tag);
  RankLink* link = event->link;
  if (link->OnEvent(event->event, ok)) OnAnswer(link);
  if (event->event == RankLink::Event::kFinished) OnStreamEnded(*link);
  return true;
}

void RankGroup::OnStreamEnded(const RankLink& link) {
  // When the launcher ends all workers behind a dead one, streams end shortly after another; whoever was
  // first is to be named, and the others' ends may lie in their queue.
  if (link.rank() == 0) DrainPeers();
  progress_.Died(link.rank(), absl::StrCat("the step stream ended: ", link.end_status().message()));
}

bool RankGroup::PumpAny(int64_t deadline_us) {
  do {
    if (PumpOne(&queue_, 0) || PumpOne(&peers_queue_, MonotonicMicros() + kSliceUs)) return true;
  } while (MonotonicMicros() < deadline_us);
  return false;
}

void RankGroup::DrainPeers() {
  while (PumpOne(&peers_queue_, 0)) {
  }
}

void RankGroup::OnAnswer(RankLink* link) {
  const uint32_t rank = link->rank();
  v1::StepResponse* response = rank == 0 ? &rank0_ : &scratch_;
  if (const absl::Status read = link->ReadMessage(response); !read.ok()) {
    progress_.Fail(rank, "its answer cannot be read");
    return;
  }
  if (!progress_.Take(rank, *response)) return;
  UpdateStatus(rank, *response);
  if (rank != 0) return;
  cost_.round_trip_us = static_cast<double>(MonotonicMicros() - sent_us_);
  cost_.worker_us = response->timings().total_us();
  cost_.transport_us = std::max(0.0, cost_.round_trip_us - cost_.worker_us);
}

void RankGroup::UpdateStatus(uint32_t rank, const v1::StepResponse& response) {
  const double busy_us = response.timings().total_us() - response.timings().collective_wait_us();
  std::lock_guard lock(mutex_);
  RankStatus& status = status_[rank];
  status.kv_slots_used = response.pool().slots_used();
  status.kv_fragmentation = response.pool().fragmentation();
  status.steps = response.step();
  status.busy_ratio += std::max(0.0, busy_us);  // microseconds; Ranks() divides by the age
}

absl::Status RankGroup::Send(v1::StepRequest* request) {
  if (state() != GroupState::kServing) return absl::UnavailableError(reason());
  const int64_t deadline_us = MonotonicMicros() + int64_t{1000} * options_.step_timeout_ms;
  for (auto& link : links_) {
    while (link->write_pending() && !over()) {
      const int64_t now_us = MonotonicMicros();
      if (PumpOne(link->rank() == 0 ? &queue_ : &peers_queue_, std::min(deadline_us, now_us + kSliceUs)))
        continue;
      if (now_us >= deadline_us) progress_.Fail(link->rank(), "its stream takes no more requests");
    }
  }
  if (over()) return EndEpoch();
  request->set_epoch(epoch_);
  request->set_step(progress_.NextStep());
  request->set_deadline_ms(static_cast<uint32_t>(RankTimeoutMs(options_.step_timeout_ms)));
  const size_t size = request->ByteSizeLong();
  grpc::Slice slice(size);
  KDT_CHECK(request->SerializeToArray(const_cast<uint8_t*>(slice.begin()), static_cast<int>(size)));
  const grpc::ByteBuffer bytes(&slice, 1);
  sent_us_ = MonotonicMicros();
  // Rank 0 last: its answer is the one waited for, and it cannot come before all others have the request.
  for (size_t i = links_.size(); i-- > 0;) links_[i]->Write(bytes);
  return absl::OkStatus();
}

absl::Status RankGroup::Receive(v1::StepResponse* response) {
  const int64_t deadline_us = sent_us_ + int64_t{1000} * options_.step_timeout_ms;
  DrainPeers();  // their answers to the last step, while the ranks compute this one
  while (!over() && progress_.answered(0) < progress_.step()) {
    const int64_t now_us = MonotonicMicros();
    if (PumpOne(&queue_, std::min(deadline_us, now_us + kSliceUs))) continue;
    DrainPeers();  // one of them may have died
    if (!progress_.failed() && now_us >= deadline_us) progress_.FailLate(options_.step_timeout_ms);
  }
  while (!over() && !progress_.AllAnswered(progress_.step() - 1)) {
    const int64_t now_us = MonotonicMicros();
    if (PumpOne(&peers_queue_, std::min(deadline_us, now_us + kSliceUs))) continue;
    if (now_us >= deadline_us) progress_.FailLate(options_.step_timeout_ms);
  }
  if (over()) return EndEpoch();
  response->Swap(&rank0_);
  return absl::OkStatus();
}

absl::Status RankGroup::Poll() {
  if (state() != GroupState::kServing) return absl::UnavailableError(reason());
  while (!progress_.failed() && (PumpOne(&queue_, 0) || PumpOne(&peers_queue_, 0))) {
  }
  const bool late = !progress_.AllAnswered(progress_.step()) &&
                    MonotonicMicros() > sent_us_ + int64_t{1000} * options_.step_timeout_ms;
  if (late) progress_.FailLate(options_.step_timeout_ms);
  return progress_.failed() ? EndEpoch() : absl::OkStatus();
}

void RankGroup::Reject(const std::string& what) {
  progress_.Fail(0, what);
  EndEpoch().IgnoreError();  // the caller knows
}

// Looks a moment for the rank that caused the failure.
std::string RankGroup::Blame() {
  const int64_t grace_end_us = MonotonicMicros() + kCulpritGraceUs;
  while (!progress_.any_died() && PumpAny(grace_end_us)) {
  }
  const auto [rank, what] = progress_.blame();
  {
    std::lock_guard lock(mutex_);
    for (RankStatus& status : status_) status.up = status.rank != rank && !progress_.died(status.rank);
    status_[rank].last_error = what;
    gone_.assign(links_.size(), false);
  }
  return absl::StrCat(links_[rank]->Name(), " (", links_[rank]->address(), "): ", what);
}

absl::Status RankGroup::EndEpoch() {
  const bool failed = progress_.failed();
  const std::string reason = failed ? Blame() : "the coordinator stops";
  CloseStreams();
  if (failed) spdlog::error("epoch {} ended: {}", epoch_, reason);
  SetState(GroupState::kDown, reason);
  return absl::UnavailableError(reason);
}

void RankGroup::CloseStreams() {
  for (auto& link : links_) link->Cancel();
  const auto open = [](const auto& link) { return !link->finished(); };
  while (std::any_of(links_.begin(), links_.end(), open)) PumpAny(MonotonicMicros() + kSliceUs);
}

void RankGroup::DrainWorkers() {
  stopping_ = true;
  if (forming_.joinable()) forming_.join();
  const bool serving = state() == GroupState::kServing;
  AtOnce(links_, [serving](RankLink& link) {
    const absl::Status drained = link.Drain("the coordinator stops");
    // One that does not listen has ended, or has not started.
    if (drained.ok() || (!serving && absl::IsUnavailable(drained))) return;
    spdlog::warn("{} did not drain: {}", link.Name(), drained.message());
  });
  if (!serving) return;
  CloseStreams();
  SetState(GroupState::kDown, "drained");
}

}  // namespace kdt
