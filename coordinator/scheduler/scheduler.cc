#include "coordinator/scheduler/scheduler.h"

#include <prometheus/registry.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/status.h"

namespace kdt {
namespace {

// For a step in flight when the scheduler stops. Nobody waits for its tokens; a rank that hangs in it would
// take the whole time-out of a step.
constexpr std::chrono::seconds kLastStep{1};

}  // namespace

Scheduler::Scheduler(SchedulerOptions options, Group* group, TextTools tools)
    : options_(std::move(options)),
      group_(group),
      tools_(std::move(tools)),
      metrics_(options_.registry ? options_.registry : std::make_shared<prometheus::Registry>()),
      speculator_(options_.speculation),
      builder_(&store_, &speculator_, options_.prefill_chunk) {}

void Scheduler::Stop(const absl::Status& why) {
  if (!thread_.joinable()) return;
  {
    std::unique_lock lock(mutex_);
    if (!stop_) stop_why_ = why;
    stop_ = true;
    changed_.notify_all();
    if (!changed_.wait_for(lock, kLastStep, [this] { return ended_; })) group_->Abandon();
  }
  thread_.join();
}

void Scheduler::Start() {
  KDT_CHECK(!thread_.joinable());
  thread_ = std::thread([this] { Run(); });
}

absl::StatusOr<uint64_t> Scheduler::Submit(RequestSpec spec, std::shared_ptr<RequestSink> sink) {
  if (group_->state() != GroupState::kServing)
    return absl::UnavailableError("no model is being served right now");
  auto request = std::make_unique<Request>();
  request->spec = std::move(spec);
  request->sink = std::move(sink);
  request->submitted_us = MonotonicMicros();
  request->unfinished = request->spec.n;
  for (uint32_t i = 0; i < request->spec.n; ++i) {
    auto sample = std::make_unique<Sample>();
    sample->request = request.get();
    sample->index = i;
    sample->tokens = request->spec.prompt;
    sample->output = std::make_unique<OutputStream>(tools_, request->spec);
    request->samples.push_back(std::move(sample));
  }
  uint64_t id = 0;
  {
    std::lock_guard lock(mutex_);
    if (draining_ || stop_) return absl::UnavailableError("the server is shutting down");
    if (waiting_count_ >= options_.max_waiting) {
      return absl::ResourceExhaustedError(
          absl::StrCat(options_.max_waiting, " requests are waiting already"));
    }
    ++waiting_count_;
    ++open_requests_;
    id = next_id_++;
    request->id = id;
    inbox_.push_back(std::move(request));
    woken_ = true;
  }
  changed_.notify_all();
  return id;
}

void Scheduler::Cancel(uint64_t id, absl::Status status) {
  {
    std::lock_guard lock(mutex_);
    cancellations_.push_back({id, std::move(status)});
    woken_ = true;
  }
  changed_.notify_all();
}

void Scheduler::Wake() {
  {
    std::lock_guard lock(mutex_);
    woken_ = true;
  }
  changed_.notify_all();
}

bool Scheduler::Drain(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  draining_ = true;
  return changed_.wait_for(lock, timeout, [this] { return open_requests_ == 0; });
}

}  // namespace kdt
