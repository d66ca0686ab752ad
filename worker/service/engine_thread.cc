#include "worker/service/engine_thread.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/log.h"
#include "common/status.h"

namespace kdt {
namespace {

constexpr uint32_t kMaxStepDeadlineMs = 3600 * 1000;
constexpr uint32_t kMaxJoinTimeoutMs = 3600 * 1000;

}  // namespace

EngineThread::EngineThread(int rank, int tp, CollectiveFactory factory, StepListener listener)
    : rank_(rank), tp_(tp), factory_(std::move(factory)), listener_(std::move(listener)), thread_([this] {
        Run();
      }) {}

EngineThread::~EngineThread() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    epoch_over_ = true;
    CancelJoin();
    if (collective_ != nullptr) collective_->Abort();
  }
  wake_.notify_one();
  thread_.join();
}

void EngineThread::Run() {
  while (true) {
    std::function<void()> task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
      // Tasks left at the stop still run: the epoch is over, so each answers at once.
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

void EngineThread::Post(std::function<void()> task) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  wake_.notify_one();
}

void EngineThread::SetEngine(std::unique_ptr<Engine> engine) {
  const std::lock_guard<std::mutex> lock(mutex_);
  KDT_CHECK(engine_ == nullptr);
  engine_ = std::move(engine);
}

bool EngineThread::Describe(v1::DescribeResponse* response) const {
  const Engine* engine = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    response->set_epoch(epoch_over_ ? 0 : epoch_);
    response->set_last_epoch(epoch_);
    engine = engine_.get();
  }
  if (engine == nullptr) return false;
  engine->Describe(response);
  return true;
}

uint64_t EngineThread::epoch() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return epoch_over_ ? 0 : epoch_;
}

void EngineThread::EndEpoch(uint64_t epoch) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (epoch != epoch_ || epoch_over_) return;
  epoch_over_ = true;
  if (collective_ != nullptr) collective_->Abort();
}

void EngineThread::CancelJoin() {
  if (joining_ != nullptr) joining_->store(true);
}

void EngineThread::JoinGroup(const v1::JoinGroupRequest& request, JoinDone done) {
  if (request.timeout_ms() == 0 || request.timeout_ms() > kMaxJoinTimeoutMs) {
    done(absl::InvalidArgumentError(
        absl::StrCat("timeout_ms: ", request.timeout_ms(), " is not in 1..", kMaxJoinTimeoutMs)));
    return;
  }
  if (request.rank() != static_cast<uint32_t>(rank_) || request.tp() != static_cast<uint32_t>(tp_)) {
    done(absl::InvalidArgumentError(absl::StrCat("rank ", request.rank(), " of ", request.tp(),
                                                 ": this worker is rank ", rank_, " of ", tp_)));
    return;
  }
  const auto cancelled = std::make_shared<std::atomic<bool>>(false);
  absl::Status refused;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (engine_ == nullptr) {
      refused = absl::FailedPreconditionError("the weights are not loaded yet");
    } else if (request.epoch() <= epoch_) {
      refused = absl::InvalidArgumentError(
          absl::StrCat("epoch: ", request.epoch(), " is not larger than ", epoch_));
    } else {
      epoch_over_ = true;  // a step of the old epoch may hang in a collective
      if (collective_ != nullptr) collective_->Abort();
      CancelJoin();
      joining_ = cancelled;
    }
  }
  if (!refused.ok()) {
    done(refused);
    return;
  }
  Post([this, request, cancelled, done = std::move(done)] { done(Join(request, cancelled)); });
}

absl::StatusOr<std::string> EngineThread::Join(const v1::JoinGroupRequest& request,
                                               const CancelFlag& cancelled) {
  if (cancelled->load()) return absl::CancelledError("another join or the end of this worker came first");
  KDT_ASSIGN_OR_RETURN(std::unique_ptr<Collective> collective, factory_(request, cancelled.get()));
  collective->SetDeadline(absl::Now() + absl::Milliseconds(request.timeout_ms()));
  KDT_RETURN_IF_ERROR(collective->Probe());
  const std::string name = collective->name();
  KDT_RETURN_IF_ERROR(engine_->StartEpoch(collective.get()));
  const std::lock_guard<std::mutex> lock(mutex_);
  collective_ = std::move(collective);
  collective_cancelled_ = cancelled;
  if (joining_ == cancelled) joining_ = nullptr;
  epoch_ = request.epoch();
  last_step_ = 0;
  epoch_over_ = stop_;
  spdlog::info("joined epoch {} as rank {} of {} over {}", epoch_, rank_, tp_, name);
  return name;
}

absl::Status EngineThread::CheckStep(const v1::StepRequest& request) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (request.epoch() != epoch_ || epoch_over_) {
    return absl::FailedPreconditionError(
        absl::StrCat("epoch ", request.epoch(), " does not run on this rank"));
  }
  if (request.step() != last_step_ + 1) {
    return absl::FailedPreconditionError(
        absl::StrCat("step ", request.step(), " came where step ", last_step_ + 1, " was due"));
  }
  if (request.deadline_ms() == 0 || request.deadline_ms() > kMaxStepDeadlineMs) {
    return absl::InvalidArgumentError(
        absl::StrCat("deadline_ms: ", request.deadline_ms(), " is not in 1..", kMaxStepDeadlineMs));
  }
  return absl::OkStatus();
}

void EngineThread::RunStep(const v1::StepRequest& request, int64_t received_ns, v1::StepResponse* response) {
  response->set_epoch(request.epoch());
  response->set_step(request.step());
  response->set_rank(static_cast<uint32_t>(rank_));
  absl::Status status = CheckStep(request);
  if (status.ok()) {
    last_step_ = request.step();
    ++steps_;
    collective_->SetDeadline(absl::Now() + absl::Milliseconds(request.deadline_ms()));
    status = engine_->Step(request, response);
  }
  if (!status.ok()) {
    spdlog::error("step {} of epoch {}: {}", request.step(), request.epoch(), status.message());
    response->clear_results();
    response->set_error_code(static_cast<uint32_t>(status.code()));
    response->set_error(std::string(status.message()));
    EndEpoch(request.epoch());
  }
  response->mutable_timings()->set_total_us(static_cast<float>(MonotonicNanos() - received_ns) * 1e-3f);
  if (listener_) listener_(request, *response);
}

void EngineThread::Step(v1::StepRequest request, StepDone done) {
  const int64_t received_ns = MonotonicNanos();
  Post([this, request = std::move(request), received_ns, done = std::move(done)] {
    v1::StepResponse response;
    RunStep(request, received_ns, &response);
    done(std::move(response));
  });
}

void EngineThread::Drain(std::function<void(uint64_t)> done) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    CancelJoin();
  }
  Post([this, done = std::move(done)] { done(steps_); });
}

}  // namespace kdt
