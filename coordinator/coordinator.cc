#include "coordinator/coordinator.h"

#include <fcntl.h>
#include <poll.h>
#include <prometheus/registry.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/process.h"
#include "common/status.h"
#include "common/utf8.h"

namespace kdt {
namespace {

constexpr std::chrono::milliseconds kDrainSlice{100};   // how late a signal is seen while requests finish
constexpr std::chrono::milliseconds kAnswerGrace{500};  // for last answers to reach their clients

absl::StatusOr<std::shared_ptr<const ServedModel>> LoadModel(const std::string& folder) {
  auto model = std::make_shared<ServedModel>();
  std::filesystem::path path(folder);
  model->name = Utf8Text((path.has_filename() ? path : path.parent_path()).filename().string());
  KDT_ASSIGN_OR_RETURN(model->config, ModelConfig::Load(folder));
  KDT_ASSIGN_OR_RETURN(model->tokenizer, Tokenizer::Load(folder));
  auto chat = ChatRenderer::Create(model->tokenizer);
  if (chat.ok()) {
    model->chat.emplace(*std::move(chat));
  } else {
    spdlog::warn("no chat: {}", chat.status().message());
  }
  return model;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Coordinator>> Coordinator::Create(CoordinatorOptions options,
                                                                 const sigset_t& signals) {
  std::unique_ptr<Coordinator> coordinator(new Coordinator(std::move(options)));
  KDT_RETURN_IF_ERROR(coordinator->Start(signals));
  return coordinator;
}

Coordinator::~Coordinator() {
  server_.reset();
  if (scheduler_ != nullptr) scheduler_->Stop();
  group_.reset();  // until then it may wake the scheduler, and Run
  for (const int fd : {signal_fd_, wake_fds_[0], wake_fds_[1]}) {
    if (fd >= 0) close(fd);
  }
}

absl::Status Coordinator::Start(const sigset_t& signals) {
  KDT_ASSIGN_OR_RETURN(const auto model, LoadModel(options_.model));
  KDT_CHECK(pipe2(wake_fds_, O_CLOEXEC | O_NONBLOCK) == 0);
  signal_fd_ = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
  KDT_CHECK(signal_fd_ >= 0);
  options_.group.on_change = [this] {
    scheduler_->Wake();  // nothing changes before Form
    WakeRun();
  };
  group_ = std::make_unique<RankGroup>(options_.group);
  KDT_RETURN_IF_ERROR(StartScheduler(model));
  KDT_ASSIGN_OR_RETURN(
      server_, ApiServer::Start(options_.listen, model, group_.get(), scheduler_.get(), options_.security));
  if (const Address* health = server_->health_address(); health != nullptr) {
    spdlog::info("health alone on {}", health->ToString());
  }
  return absl::OkStatus();
}

absl::Status Coordinator::StartScheduler(std::shared_ptr<const ServedModel> model) {
  SchedulerOptions options = options_.scheduler;
  options.vocab_size = static_cast<uint32_t>(model->config.vocab_size);
  if (!options_.record_trees.empty()) {
    KDT_ASSIGN_OR_RETURN(
        recorder_, TreeRecorder::Open(options_.record_trees, options_.record_trees_count, model->tokenizer));
    options.speculation.on_verified = [this](const Sample& sample, std::span<const uint32_t> accepted) {
      recorder_->Record(sample, accepted);
    };
  }
  options.registry = std::make_shared<prometheus::Registry>();
  if (options_.metrics_port >= 0) {
    KDT_ASSIGN_OR_RETURN(
        metrics_, MetricsServer::Start({options_.metrics_host, options_.metrics_port, ""}, options.registry));
    spdlog::info("metrics on {}:{}", options_.metrics_host, metrics_->port());
  }
  options.on_group_lost = [this](const std::string& reason) {
    spdlog::error("the group is lost: {}", reason);
    group_lost_ = true;
    WakeRun();
  };
  TextTools tools{model->tokenizer, std::nullopt};
  if (auto control = ControlTokens::Find(*model->tokenizer); control.ok()) tools.control = *control;
  scheduler_ = std::make_unique<Scheduler>(std::move(options), group_.get(), std::move(tools));
  return absl::OkStatus();
}

void Coordinator::WakeRun() {
  const char byte = 0;
  [[maybe_unused]] const ssize_t written = write(wake_fds_[1], &byte, 1);
}

void Coordinator::TakeSignals() {
  signalfd_siginfo info;
  while (read(signal_fd_, &info, sizeof(info)) == sizeof(info)) {
    stop_.wanted = true;
    stop_.given_up = stop_.given_up || info.ssi_signo == kGroupGivenUp;
    stop_.leaves_ranks = info.ssi_signo == SIGHUP;  // the last counts: SIGTERM behind it stops all
  }
}

absl::Status Coordinator::CheckSpeculation(const GroupLimits& limits) const {
  if (limits.draft_block_size == 0) {
    if (!options_.speculation_flags.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("--", options_.speculation_flags.front(),
                                                     " does nothing: the workers have loaded no drafter"));
    }
    if (options_.expects_drafter) {
      spdlog::warn("--drafter is given, but the workers have loaded none: there is no speculation");
    }
    return absl::OkStatus();
  }
  const uint32_t budget = options_.scheduler.speculation.budget.value_or(0);
  const uint32_t most = std::max(limits.max_tree_nodes, 1U) - 1;
  if (budget <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--budget: ", budget, " drafted nodes, the workers take at most ", most, " a tree"));
}

void Coordinator::Announce() const {
  std::printf("kdt-coordinator ready listen=%s\n", server_->address().ToString().c_str());
  std::fflush(stdout);
}

absl::Status Coordinator::ServeUntilStop() {
  bool announced = false;
  while (!stop_.wanted && !group_lost_) {
    pollfd fds[2] = {{signal_fd_, POLLIN, 0}, {wake_fds_[0], POLLIN, 0}};
    poll(fds, 2, -1);
    char bytes[64];
    while (read(wake_fds_[0], bytes, sizeof(bytes)) > 0) {
    }
    TakeSignals();
    const bool serving = group_->state() == GroupState::kServing;
    server_->SetServing(serving && !stop_.wanted);
    if (!serving || announced) continue;
    KDT_RETURN_IF_ERROR(CheckSpeculation(group_->limits()));
    Announce();
    announced = true;
  }
  return absl::OkStatus();
}

bool Coordinator::DrainRequests() {
  spdlog::info("draining");
  const auto deadline = std::chrono::steady_clock::now() + options_.drain_timeout;
  while (!scheduler_->Drain(kDrainSlice)) {
    TakeSignals();
    if (stop_.given_up) {
      spdlog::error("kdt-launch gives the group up: running requests are ended");
      return false;
    }
    if (!group_->MayServeSoon()) {
      spdlog::error("running requests are ended, ranks are gone: {}", group_->reason());
      return false;
    }
    if (std::chrono::steady_clock::now() < deadline) continue;
    spdlog::warn("some requests did not finish in time and are ended");
    break;
  }
  return true;
}

absl::StatusOr<int> Coordinator::Run() {
  group_->Form();
  scheduler_->Start();
  const absl::Status fits = ServeUntilStop();
  if (stop_.wanted && !DrainRequests()) scheduler_->Stop(absl::UnavailableError(kGroupLost));
  const bool lost = stop_.given_up || group_lost_;
  scheduler_->Stop();
  server_->Shutdown(kAnswerGrace);
  KDT_RETURN_IF_ERROR(fits);
  TakeSignals();  // SIGTERM may have come behind SIGHUP
  if (!lost && !stop_.leaves_ranks) group_->DrainWorkers();
  return lost ? kExitGroupLost : 0;
}

}  // namespace kdt
