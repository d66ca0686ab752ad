#include "deploy/launch/group_supervisor.h"

#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/address.h"
#include "common/log.h"
#include "common/status.h"
#include "common/worker_note.h"

namespace kdt {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr absl::string_view kCoordinatorReady = "kdt-coordinator ready ";
constexpr absl::string_view kWorkerReady = "kdt-worker ready ";
constexpr absl::string_view kWorkerEnds = "kdt-worker ends: ";
constexpr milliseconds kEndGrace{1500};    // after SIGTERM, before SIGKILL
constexpr milliseconds kDrainGrace{5000};  // after the coordinator's own time, or the first rank's end
constexpr int kDrainSliceMs = 50;
constexpr int kKilledMs = 5000;  // for the kernel to end a killed process
constexpr std::chrono::minutes kRestartWindow{10};
constexpr std::chrono::seconds kMaxBackoff{30};

// Killed when it still runs at the deadline.
void EndBy(ChildProcess* process, Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now()).count();
  if (process->WaitEnded(static_cast<int>(std::max<int64_t>(left, 0)))) return;
  process->Signal(SIGKILL);
  process->WaitEnded(kKilledMs);
}

struct WorkerEnd {
  bool early = false;  // it ended by itself before it listened
  std::string why;     // ": REASON" when it told one
};

WorkerEnd ReadWorkerEnd(ChildProcess& worker) {
  WorkerEnd end;
  end.early = worker.exit_status().has_value();
  const std::string output = worker.TakeOutput();
  for (absl::string_view line : absl::StrSplit(output, '\n')) {
    if (absl::StartsWith(line, kWorkerReady)) end.early = false;
    if (absl::ConsumePrefix(&line, kWorkerEnds)) end.why = absl::StrCat(": ", line);
  }
  return end;
}

}  // namespace

GroupSupervisor::~GroupSupervisor() { EndAll(milliseconds(0)); }

std::string GroupSupervisor::WorkerAddress(int rank) const {
  if (!options_.worker_host.empty()) {
    return Address{options_.worker_host, options_.worker_port + rank - options_.first_rank, ""}.ToString();
  }
  return absl::StrCat("unix:", socket_dir_, "/rank", rank, ".sock");
}

absl::Status GroupSupervisor::StartWorkers() {
  workers_.clear();
  for (int i = 0; i < options_.ranks; ++i) {
    const int rank = options_.first_rank + i;
    RemoveLossNote(WorkerAddress(rank));
    TakeHangNote(WorkerAddress(rank));  // of an earlier one
    ChildProcess::Options process;
    process.name = absl::StrCat("worker ", rank);
    process.argv = {absl::StrCat(options_.bin_dir, "/kdt-worker"), absl::StrCat("--rank=", rank),
                    absl::StrCat("--tp=", options_.tp), absl::StrCat("--listen=", WorkerAddress(rank)),
                    "--die_with_parent"};
    if (options_.metrics_port >= 0) {
      const int port = options_.metrics_port == 0 ? 0 : options_.metrics_port + 1 + i;
      process.argv.push_back(absl::StrCat("--metrics_port=", port));
    }
    if (!options_.devices.empty()) {
      const int device = options_.devices[static_cast<size_t>(i) % options_.devices.size()];
      process.argv.push_back(absl::StrCat("--device=", device));
    }
    process.argv.insert(process.argv.end(), options_.worker_args.begin(), options_.worker_args.end());
    process.capture_stdout = true;  // its own ready line is not for the launcher's reader
    KDT_ASSIGN_OR_RETURN(ChildProcess worker, ChildProcess::Start(process));
    workers_.push_back(std::move(worker));
  }
  return absl::OkStatus();
}

absl::Status GroupSupervisor::StartCoordinator() {
  std::vector<std::string> addresses;
  for (int rank = 0; rank < options_.tp; ++rank) addresses.push_back(WorkerAddress(rank));
  ChildProcess::Options process;
  process.name = "coordinator";
  process.argv = {absl::StrCat(options_.bin_dir, "/kdt-coordinator"),
                  absl::StrCat("--workers=", absl::StrJoin(addresses, ",")), "--die_with_parent",
                  absl::StrCat("--drain_timeout_s=", options_.drain_timeout_s),
                  absl::StrCat("--on_group_loss=", options_.on_loss == OnLoss::kRestart ? "rejoin" : "exit")};
  if (options_.metrics_port >= 0) {
    process.argv.push_back(absl::StrCat("--metrics_port=", options_.metrics_port));
  }
  process.argv.insert(process.argv.end(), options_.coordinator_args.begin(), options_.coordinator_args.end());
  process.capture_stdout = true;
  KDT_ASSIGN_OR_RETURN(ChildProcess coordinator, ChildProcess::Start(process));
  coordinator_.emplace(std::move(coordinator));
  return absl::OkStatus();
}

absl::Status GroupSupervisor::Start() {
  socket_dir_ = options_.socket_dir;
  if (socket_dir_.empty() && options_.worker_host.empty()) {
    KDT_ASSIGN_OR_RETURN(own_dir_, GroupFolder::Make());
    socket_dir_ = own_dir_.path();
  }
  KDT_RETURN_IF_ERROR(StartWorkers());
  if (options_.role == Role::kAll) return StartCoordinator();
  std::printf("kdt workers started\n");
  std::fflush(stdout);
  return absl::OkStatus();
}

void GroupSupervisor::ReadCoordinatorOutput() {
  char buffer[4096];
  const ssize_t got = read(coordinator_->stdout_fd(), buffer, sizeof(buffer));
  if (got <= 0) return;  // its end is told by SIGCHLD
  coordinator_output_.append(buffer, static_cast<size_t>(got));
  for (size_t end = coordinator_output_.find('\n'); end != std::string::npos;
       end = coordinator_output_.find('\n')) {
    absl::string_view line(coordinator_output_.data(), end);
    if (absl::ConsumePrefix(&line, kCoordinatorReady)) {
      std::printf("kdt ready %.*s\n", static_cast<int>(line.size()), line.data());
      std::fflush(stdout);
    }
    coordinator_output_.erase(0, end + 1);
  }
}

ChildProcess* GroupSupervisor::FirstEnded() {
  ChildProcess* first = nullptr;
  for (ChildProcess& worker : workers_) {
    if (!worker.Ended()) continue;
    const bool killed = !worker.exit_status().has_value();
    if (first == nullptr || (killed && first->exit_status().has_value())) first = &worker;
  }
  if (first == nullptr && coordinator_.has_value() && coordinator_->Ended()) first = &*coordinator_;
  return first;
}

GroupSupervisor::Loss GroupSupervisor::Examine(ChildProcess& lost) {
  Loss loss;
  loss.of_worker = !coordinator_.has_value() || &lost != &*coordinator_;
  std::string why;
  if (loss.of_worker) {
    const WorkerEnd end = ReadWorkerEnd(lost);
    loss.before_it_listened = end.early;
    const bool hung = std::find(hung_.begin(), hung_.end(), lost.pid()) != hung_.end();
    why = hung ? ": it hung" : end.why;
  } else {
    // It may have ended over a worker that still told it why.
    for (size_t i = 0; i < workers_.size() && why.empty(); ++i) {
      if (const std::string told = ReadWorkerEnd(workers_[i]).why; !told.empty())
        why = absl::StrCat(" (", workers_[i].name(), told, ")");
    }
  }
  loss.reason = absl::StrCat(lost.name(), " (pid ", lost.pid(), ") ", lost.EndReason(),
                             loss.before_it_listened ? " before it listened" : "", why);
  if (loss.of_worker) {
    const auto index = static_cast<int>(&lost - workers_.data());
    WriteLossNote(WorkerAddress(options_.first_rank + index), loss.reason);
  }
  return loss;
}

bool GroupSupervisor::HandleLoss(ChildProcess& lost) {
  const Loss loss = Examine(lost);
  const auto now = Clock::now();
  losses_.push_back(now);
  std::erase_if(losses_, [&](Clock::time_point at) { return now - at > kRestartWindow; });

  // What a worker refuses at the first start (a flag, an address) it refuses again.
  const bool hopeless = loss.before_it_listened && first_loss_.empty();
  if (first_loss_.empty()) first_loss_ = loss.reason;
  const bool coordinator_lost = coordinator_.has_value() && coordinator_->Ended();
  const bool restarts = options_.on_loss == OnLoss::kRestart && loss.of_worker && !coordinator_lost &&
                        !hopeless && static_cast<int>(losses_.size()) <= options_.max_restarts;
  const auto backoff = std::min<std::chrono::seconds>(
      std::chrono::seconds(1 << std::min<size_t>(losses_.size() - 1, 5)), kMaxBackoff);
  spdlog::error("{}; {}", loss.reason,
                restarts
                    ? absl::StrCat("restarting all ", options_.ranks, " workers in ", backoff.count(), " s")
                    : "ending the group");
  if (first_loss_ != loss.reason) spdlog::error("the first loss was: {}", first_loss_);
  if (!restarts || !KillWorkers()) return false;
  restart_at_ = now + backoff;
  return true;
}

// All ranks together: the survivors hold collectives with the lost one.
bool GroupSupervisor::KillWorkers() {
  for (ChildProcess& worker : workers_) worker.Signal(SIGKILL);
  for (ChildProcess& worker : workers_) {
    if (worker.WaitEnded(kKilledMs)) continue;
    // A new one would find its memory and its device taken.
    spdlog::error("{} (pid {}) does not end when it is killed: its device may hang; ending the group",
                  worker.name(), worker.pid());
    return false;
  }
  workers_.clear();
  hung_.clear();
  return true;
}

bool GroupSupervisor::RestartIfDue() {
  if (!restart_at_.has_value() || Clock::now() < *restart_at_) return true;
  restart_at_.reset();
  const absl::Status started = StartWorkers();
  if (!started.ok()) spdlog::error("{}; ending the group", started.message());
  return started.ok();
}

void GroupSupervisor::KillHungWorkers() {
  for (size_t i = 0; i < workers_.size(); ++i) {
    ChildProcess& worker = workers_[i];
    if (!TakeHangNote(WorkerAddress(options_.first_rank + static_cast<int>(i))) || worker.Ended()) continue;
    spdlog::error("{} (pid {}) hangs, as its coordinator tells: it is killed", worker.name(), worker.pid());
    hung_.push_back(worker.pid());
    worker.Signal(SIGKILL);
  }
}

int GroupSupervisor::PollTimeoutMs() const {
  constexpr milliseconds kLongest{1000};  // how late a note of a worker that hangs is seen
  if (!restart_at_.has_value()) return static_cast<int>(kLongest.count());
  const auto left = std::chrono::ceil<milliseconds>(*restart_at_ - Clock::now());
  return static_cast<int>(std::clamp(left, milliseconds(0), kLongest).count());
}

void GroupSupervisor::AwaitWorkers() {
  for (ChildProcess& worker : workers_) worker.Signal(kEndWhenUnused);
  auto deadline = Clock::now() + std::chrono::seconds(options_.drain_timeout_s);
  bool ending = false;
  while (true) {
    KillHungWorkers();
    std::vector<std::string> running;
    for (ChildProcess& worker : workers_) {
      if (!worker.Ended()) running.push_back(worker.name());
    }
    if (running.empty()) return;
    // They are ended together, and without one of them there is nothing that the others could finish.
    if (!ending && running.size() < workers_.size()) {
      ending = true;
      deadline = std::min(deadline, Clock::now() + kDrainGrace);
    }
    if (Clock::now() >= deadline) {
      spdlog::warn("not ended by the coordinator in time: {}", absl::StrJoin(running, ", "));
      return;
    }
    std::this_thread::sleep_for(milliseconds(kDrainSliceMs));
  }
}

// It notices by itself when ranks are gone, which are not started again here.
void GroupSupervisor::AwaitCoordinator() {
  coordinator_->Signal(SIGTERM);
  const auto patience = std::chrono::seconds(options_.drain_timeout_s) + kDrainGrace;
  if (coordinator_->WaitEnded(static_cast<int>(milliseconds(patience).count()))) return;
  spdlog::warn("the coordinator did not end in time and is killed");
}

int GroupSupervisor::Drain() {
  spdlog::info("draining: no new requests, running ones get up to {} s", options_.drain_timeout_s);
  if (coordinator_.has_value()) {
    AwaitCoordinator();
  } else {
    AwaitWorkers();
  }
  EndAll(kEndGrace);
  for (int i = 0; i < options_.ranks; ++i) RemoveLossNote(WorkerAddress(options_.first_rank + i));
  spdlog::info("stopped");
  return 0;
}

void GroupSupervisor::GiveUp() {
  if (coordinator_.has_value()) coordinator_->Signal(kGroupGivenUp);
  EndWorkers(kEndGrace);  // a step that waits for them ends
  if (coordinator_.has_value()) coordinator_->WaitEnded(static_cast<int>(kEndGrace.count()));
  EndAll(milliseconds(0));
}

void GroupSupervisor::EndAll(milliseconds grace) {
  if (coordinator_.has_value() && grace.count() > 0) coordinator_->Signal(SIGTERM);
  const auto deadline = Clock::now() + grace;
  EndWorkers(grace);
  if (coordinator_.has_value()) EndBy(&*coordinator_, deadline);
  coordinator_.reset();
}

void GroupSupervisor::EndWorkers(milliseconds grace) {
  if (grace.count() > 0) {
    for (ChildProcess& worker : workers_) worker.Signal(SIGTERM);
  }
  const auto deadline = Clock::now() + grace;
  for (ChildProcess& worker : workers_) EndBy(&worker, deadline);
  workers_.clear();
}

int GroupSupervisor::Run() {
  const sigset_t signals = BlockSignals({SIGTERM, SIGINT, SIGHUP, SIGCHLD});
  const int signal_fd = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
  KDT_CHECK(signal_fd >= 0);

  const absl::Status started = Start();
  if (!started.ok()) {
    spdlog::error("{}", started.message());
    close(signal_fd);
    return 1;
  }
  int result = -1;
  while (result < 0) {
    const bool reads = coordinator_.has_value() && !coordinator_->Ended();
    pollfd fds[2] = {{signal_fd, POLLIN, 0}, {reads ? coordinator_->stdout_fd() : -1, POLLIN, 0}};
    poll(fds, 2, PollTimeoutMs());
    if ((fds[1].revents & POLLIN) != 0) ReadCoordinatorOutput();
    signalfd_siginfo info;
    bool stop = false;
    while (read(signal_fd, &info, sizeof(info)) == sizeof(info)) {
      stop = stop || info.ssi_signo != SIGCHLD;
    }
    KillHungWorkers();
    if (stop) {
      result = Drain();
    } else if (ChildProcess* const lost = FirstEnded();
               (lost != nullptr && !HandleLoss(*lost)) || !RestartIfDue()) {
      GiveUp();
      result = 1;
    }
  }
  close(signal_fd);
  return result;
}

}  // namespace kdt
