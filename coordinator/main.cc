// kdt-coordinator: the public API, the scheduler and the group of ranks.
#include <fcntl.h>
#include <poll.h>
#include <prometheus/registry.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/address.h"
#include "common/flags.h"
#include "common/group_security.h"
#include "common/log.h"
#include "common/metrics.h"
#include "common/process.h"
#include "common/status.h"
#include "common/utf8.h"
#include "coordinator/api/security_flags.h"
#include "coordinator/api/server.h"
#include "coordinator/group/rank_group.h"
#include "coordinator/scheduler/scheduler.h"
#include "coordinator/scheduler/tree_recorder.h"

ABSL_FLAG(std::string, model, "", "folder of the target checkpoint (configuration and tokenizer are read)");
ABSL_FLAG(std::string, drafter, "", "folder of the drafter that the workers are expected to have loaded");
ABSL_FLAG(std::vector<std::string>, workers, {}, "addresses of the workers by rank: unix:PATH or HOST:PORT");
ABSL_FLAG(std::string, listen, "127.0.0.1:50051", "HOST:PORT of the public API; port 0 takes a free one");
ABSL_FLAG(std::string, group_tls_server_name, "",
          "name in the workers' certificates, when it is not the host of their address");
ABSL_FLAG(int, metrics_port, -1, "port of /metrics; 0 takes a free one, -1: none");
ABSL_FLAG(std::string, metrics_host, "127.0.0.1", "address that the port of /metrics is bound to");
ABSL_FLAG(int, max_waiting, 256,
          "requests that may wait before new ones are refused, at least 1: each waits for a moment");
ABSL_FLAG(int, max_running, 64, "samples that run at once");
ABSL_FLAG(int, prefill_chunk, 512, "most prompt tokens of one sample a step");
ABSL_FLAG(int, step_timeout_ms, 30'000, "deadline of one step; a rank that misses it ends the epoch");
ABSL_FLAG(std::string, budget, "auto", "drafted nodes a tree: auto or a number");
ABSL_FLAG(std::string, record_trees, "", "write verified trees to this file, for kdt tree to draw");
ABSL_FLAG(int, record_trees_count, 16, "with --record_trees: how many, the first ones");
ABSL_FLAG(std::string, tree, "best-first", "best-first, spine-first or chain");
ABSL_FLAG(std::string, on_group_loss, "exit",
          "exit: end with status 3; rejoin: wait for the workers, form the group again and go on");
ABSL_FLAG(
    int, drain_timeout_s, 30,
    "on SIGTERM (and SIGHUP, which leaves the ranks to the next coordinator): how long running requests "
    "may go on");
ABSL_FLAG(bool, die_with_parent, false, "end when the parent process ends");
ABSL_FLAG(std::string, log_level, "info", "trace, debug, info, warn or error");

namespace kdt {
namespace {

constexpr int kExitGroupLost = 3;
constexpr int kMaxStepTimeoutMs = 3'600'000;            // what workers take
constexpr std::chrono::milliseconds kDrainSlice{100};   // how late a signal is seen while requests finish
constexpr std::chrono::milliseconds kAnswerGrace{500};  // for last answers to reach their clients

// What the signal loop waits for beside signals; written from other threads.
struct Events {
  int pipe_read = -1;
  int pipe_write = -1;
  std::atomic<bool> group_lost{false};
  void Notify() const {
    const char byte = 0;
    [[maybe_unused]] const ssize_t written = write(pipe_write, &byte, 1);
  }
};

absl::Status CheckAtLeast(const char* flag, int value, int min) {
  if (value >= min) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", flag, ": ", value, " is less than ", min));
}

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

absl::Status CheckFlags() {
  if (absl::GetFlag(FLAGS_model).empty()) return absl::InvalidArgumentError("--model is required");
  if (absl::GetFlag(FLAGS_workers).empty()) return absl::InvalidArgumentError("--workers is required");
  KDT_RETURN_IF_ERROR(CheckAtLeast("metrics_port", absl::GetFlag(FLAGS_metrics_port), -1));
  KDT_RETURN_IF_ERROR(CheckAtLeast("max_waiting", absl::GetFlag(FLAGS_max_waiting), 1));
  KDT_RETURN_IF_ERROR(CheckAtLeast("max_running", absl::GetFlag(FLAGS_max_running), 1));
  KDT_RETURN_IF_ERROR(CheckAtLeast("record_trees_count", absl::GetFlag(FLAGS_record_trees_count), 1));
  KDT_RETURN_IF_ERROR(CheckAtLeast("prefill_chunk", absl::GetFlag(FLAGS_prefill_chunk), 1));
  KDT_RETURN_IF_ERROR(CheckAtLeast("step_timeout_ms", absl::GetFlag(FLAGS_step_timeout_ms), 1));
  if (absl::GetFlag(FLAGS_step_timeout_ms) > kMaxStepTimeoutMs) {
    return absl::InvalidArgumentError(absl::StrCat("--step_timeout_ms: more than ", kMaxStepTimeoutMs));
  }
  KDT_RETURN_IF_ERROR(CheckAtLeast("drain_timeout_s", absl::GetFlag(FLAGS_drain_timeout_s), 0));
  const std::string on_loss = absl::GetFlag(FLAGS_on_group_loss);
  if (on_loss != "exit" && on_loss != "rejoin") {
    return absl::InvalidArgumentError(
        absl::StrCat("--on_group_loss: \"", on_loss, "\" is neither exit nor rejoin"));
  }
  return absl::OkStatus();
}

absl::StatusOr<RankSecurity> ReadRankSecurity() {
  RankSecurity security;
  KDT_ASSIGN_OR_RETURN(const auto tls, GroupTlsFromFlags());
  for (const std::string& worker : absl::GetFlag(FLAGS_workers)) {
    KDT_ASSIGN_OR_RETURN(const Address address, ParseAddress(worker, "--workers"));
    KDT_RETURN_IF_ERROR(CheckGroupAddress(address, "--workers", tls.has_value(), InsecureGroupAllowed()));
  }
  security.server_name = absl::GetFlag(FLAGS_group_tls_server_name);
  if (tls.has_value()) {
    security.credentials = ClientCredentials(*tls);
  } else if (!security.server_name.empty()) {
    return absl::InvalidArgumentError("--group_tls_server_name needs --group_tls_cert too");
  }
  return security;
}

absl::StatusOr<SpeculationOptions> ReadSpeculation() {
  SpeculationOptions options;
  KDT_ASSIGN_OR_RETURN(options.policy, ParseTreePolicy(absl::GetFlag(FLAGS_tree)));
  const std::string budget = absl::GetFlag(FLAGS_budget);
  if (budget == "auto") return options;
  uint32_t nodes = 0;
  if (!absl::SimpleAtoi(budget, &nodes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--budget: \"", budget, "\" is neither auto nor a number"));
  }
  options.budget = nodes;
  return options;
}

// What a signal asks for.
struct Stop {
  bool wanted = false;
  bool given_up = false;      // kdt-launch will not start the ranks again: requests are not waited for
  bool leaves_ranks = false;  // another coordinator is to join them

  void Take(int signal_fd) {
    signalfd_siginfo info;
    while (read(signal_fd, &info, sizeof(info)) == sizeof(info)) {
      wanted = true;
      given_up = given_up || info.ssi_signo == kGroupGivenUp;
      leaves_ranks = info.ssi_signo == SIGHUP;  // the last counts: SIGTERM behind it stops all
    }
  }
};

// Lets running requests finish, until the flag's time has passed or the group is given up.
void DrainRequests(Scheduler* scheduler, int signal_fd, Stop* stop) {
  spdlog::info("draining");
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::seconds(absl::GetFlag(FLAGS_drain_timeout_s));
  while (!stop->given_up) {
    if (scheduler->Drain(kDrainSlice)) return;
    stop->Take(signal_fd);
    if (std::chrono::steady_clock::now() < deadline) continue;
    spdlog::warn("some requests did not finish in time and are ended");
    return;
  }
}

// Serves until one of `signals` comes or until the group is lost; returns the exit status.
absl::StatusOr<int> Serve(const sigset_t& signals) {
  KDT_RETURN_IF_ERROR(CheckFlags());
  KDT_ASSIGN_OR_RETURN(const Address listen, ParseAddress(absl::GetFlag(FLAGS_listen), "--listen"));
  KDT_ASSIGN_OR_RETURN(const ApiSecurity security, ApiSecurityFromFlags(listen));
  KDT_ASSIGN_OR_RETURN(const auto model, LoadModel(absl::GetFlag(FLAGS_model)));

  Events events;
  int pipe_fds[2];
  KDT_CHECK(pipe2(pipe_fds, O_CLOEXEC | O_NONBLOCK) == 0);
  events.pipe_read = pipe_fds[0];
  events.pipe_write = pipe_fds[1];
  const int signal_fd = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
  KDT_CHECK(signal_fd >= 0);

  std::atomic<Scheduler*> to_wake{nullptr};
  RankGroupOptions group_options;
  group_options.addresses = absl::GetFlag(FLAGS_workers);
  KDT_ASSIGN_OR_RETURN(group_options.security, ReadRankSecurity());
  group_options.step_timeout_ms = absl::GetFlag(FLAGS_step_timeout_ms);
  group_options.on_change = [&] {
    if (Scheduler* scheduler = to_wake.load(); scheduler != nullptr) scheduler->Wake();
    events.Notify();
  };
  RankGroup group(std::move(group_options));

  SchedulerOptions options;
  options.vocab_size = static_cast<uint32_t>(model->config.vocab_size);
  options.max_waiting = static_cast<uint32_t>(absl::GetFlag(FLAGS_max_waiting));
  options.max_running = static_cast<uint32_t>(absl::GetFlag(FLAGS_max_running));
  options.prefill_chunk = static_cast<uint32_t>(absl::GetFlag(FLAGS_prefill_chunk));
  KDT_ASSIGN_OR_RETURN(options.speculation, ReadSpeculation());
  const std::optional<uint32_t> budget = options.speculation.budget;
  std::unique_ptr<TreeRecorder> recorder;
  if (const std::string path = absl::GetFlag(FLAGS_record_trees); !path.empty()) {
    KDT_ASSIGN_OR_RETURN(
        recorder, TreeRecorder::Open(path, static_cast<size_t>(absl::GetFlag(FLAGS_record_trees_count)),
                                     model->tokenizer));
    options.speculation.on_verified = [&recorder](const Sample& sample, std::span<const uint32_t> accepted) {
      recorder->Record(sample, accepted);
    };
  }
  options.registry = std::make_shared<prometheus::Registry>();
  std::unique_ptr<MetricsServer> metrics;
  if (const int port = absl::GetFlag(FLAGS_metrics_port); port >= 0) {
    KDT_ASSIGN_OR_RETURN(
        metrics, MetricsServer::Start({absl::GetFlag(FLAGS_metrics_host), port, ""}, options.registry));
    spdlog::info("metrics on {}:{}", absl::GetFlag(FLAGS_metrics_host), metrics->port());
  }
  options.rejoin = absl::GetFlag(FLAGS_on_group_loss) == "rejoin";
  options.on_group_lost = [&](const std::string& reason) {
    spdlog::error("the group is lost: {}", reason);
    events.group_lost = true;
    events.Notify();
  };
  TextTools tools{model->tokenizer, std::nullopt};
  if (auto control = ControlTokens::Find(*model->tokenizer); control.ok()) tools.control = *control;
  Scheduler scheduler(std::move(options), &group, std::move(tools));
  KDT_ASSIGN_OR_RETURN(const auto server, ApiServer::Start(listen, model, &group, &scheduler, security));
  if (const Address* health = server->health_address(); health != nullptr) {
    spdlog::info("health alone on {}", health->ToString());
  }
  to_wake = &scheduler;
  group.Form();
  scheduler.Start();

  bool announced = false;
  Stop stop;
  absl::Status bad_budget;  // known once the ranks have told what they take
  while (!stop.wanted && !events.group_lost) {
    pollfd fds[2] = {{signal_fd, POLLIN, 0}, {events.pipe_read, POLLIN, 0}};
    poll(fds, 2, -1);
    char bytes[64];
    while (read(events.pipe_read, bytes, sizeof(bytes)) > 0) {
    }
    stop.Take(signal_fd);
    const bool serving = group.state() == GroupState::kServing;
    server->SetServing(serving && !stop.wanted);
    if (serving && !announced) {
      announced = true;
      const uint32_t most = std::max(group.limits().max_tree_nodes, 1U) - 1;
      if (budget.has_value() && *budget > most) {
        bad_budget = absl::InvalidArgumentError(absl::StrCat(
            "--budget: ", *budget, " drafted nodes, the workers take at most ", most, " a tree"));
        break;
      }
      if (!absl::GetFlag(FLAGS_drafter).empty() && group.limits().draft_block_size == 0) {
        spdlog::warn("--drafter is given, but the workers have loaded none: there is no speculation");
      }
      std::printf("kdt-coordinator ready listen=%s\n", server->address().ToString().c_str());
      std::fflush(stdout);
    }
  }
  if (stop.wanted) DrainRequests(&scheduler, signal_fd, &stop);
  if (stop.given_up) {
    spdlog::error("kdt-launch gives the group up: running requests are ended");
    scheduler.Stop(absl::UnavailableError(kGroupLost));
  }
  scheduler.Stop();
  server->Shutdown(kAnswerGrace);
  to_wake = nullptr;
  KDT_RETURN_IF_ERROR(bad_budget);
  stop.Take(signal_fd);  // SIGTERM may have come behind SIGHUP
  const bool lost = stop.given_up || events.group_lost;
  if (!lost && !stop.leaves_ranks) group.DrainWorkers();
  close(signal_fd);
  return lost ? kExitGroupLost : 0;
}

}  // namespace
}  // namespace kdt

int main(int argc, char** argv) {
  kdt::ParseFlags(argc, argv, "serves the public API in front of a group of workers");
  if (absl::GetFlag(FLAGS_die_with_parent) && !kdt::DieWithParent()) return 1;
  if (const absl::Status status = kdt::InitLogging("coordinator", absl::GetFlag(FLAGS_log_level));
      !status.ok()) {
    std::fprintf(stderr, "kdt-coordinator: %s\n", std::string(status.message()).c_str());
    return 2;
  }
  const absl::StatusOr<int> served =
      kdt::Serve(kdt::BlockSignals({SIGTERM, SIGINT, SIGHUP, kdt::kGroupGivenUp}));
  if (!served.ok()) {
    spdlog::error("{}", served.status().message());
    return 1;
  }
  return *served;
}
