// kdt-coordinator: the public API, the scheduler and the group of ranks. Its flags are read here.
#include <signal.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/address.h"
#include "common/flags.h"
#include "common/group_security.h"
#include "common/log.h"
#include "common/process.h"
#include "common/status.h"
#include "coordinator/api/security_flags.h"
#include "coordinator/coordinator.h"

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

constexpr int kMaxStepTimeoutMs = 3'600'000;  // what workers take

absl::Status CheckAtLeast(const char* flag, int value, int min) {
  if (value >= min) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", flag, ": ", value, " is less than ", min));
}

absl::Status CheckFlags() {
  if (absl::GetFlag(FLAGS_model).empty()) return absl::InvalidArgumentError("--model is required");
  if (absl::GetFlag(FLAGS_workers).empty()) return absl::InvalidArgumentError("--workers is required");
  KDT_RETURN_IF_ERROR(CheckAtLeast("metrics_port", absl::GetFlag(FLAGS_metrics_port), -1));
  KDT_RETURN_IF_ERROR(CheckAtLeast("max_waiting", absl::GetFlag(FLAGS_max_waiting), 1));
  KDT_RETURN_IF_ERROR(CheckAtLeast("max_running", absl::GetFlag(FLAGS_max_running), 1));
  KDT_RETURN_IF_ERROR(CheckAtLeast("record_trees_count", absl::GetFlag(FLAGS_record_trees_count), 1));
  if (absl::GetFlag(FLAGS_record_trees).empty() && FlagIsSet("record_trees_count")) {
    return FlagDoesNothing("record_trees_count", "without --record_trees");
  }
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

absl::StatusOr<CoordinatorOptions> ReadOptions() {
  KDT_RETURN_IF_ERROR(CheckFlags());
  CoordinatorOptions options;
  options.model = absl::GetFlag(FLAGS_model);
  KDT_ASSIGN_OR_RETURN(options.listen, ParseAddress(absl::GetFlag(FLAGS_listen), "--listen"));
  KDT_ASSIGN_OR_RETURN(options.security, ApiSecurityFromFlags(options.listen));
  options.group.addresses = absl::GetFlag(FLAGS_workers);
  KDT_ASSIGN_OR_RETURN(options.group.security, ReadRankSecurity());
  options.group.step_timeout_ms = absl::GetFlag(FLAGS_step_timeout_ms);
  options.scheduler.max_waiting = static_cast<uint32_t>(absl::GetFlag(FLAGS_max_waiting));
  options.scheduler.max_running = static_cast<uint32_t>(absl::GetFlag(FLAGS_max_running));
  options.scheduler.prefill_chunk = static_cast<uint32_t>(absl::GetFlag(FLAGS_prefill_chunk));
  KDT_ASSIGN_OR_RETURN(options.scheduler.speculation, ReadSpeculation());
  options.scheduler.rejoin = absl::GetFlag(FLAGS_on_group_loss) == "rejoin";
  options.metrics_host = absl::GetFlag(FLAGS_metrics_host);
  options.metrics_port = absl::GetFlag(FLAGS_metrics_port);
  options.record_trees = absl::GetFlag(FLAGS_record_trees);
  options.record_trees_count = static_cast<size_t>(absl::GetFlag(FLAGS_record_trees_count));
  options.expects_drafter = !absl::GetFlag(FLAGS_drafter).empty();
  for (const char* name : {"budget", "tree", "record_trees"}) {
    if (FlagIsSet(name)) options.speculation_flags.emplace_back(name);
  }
  options.drain_timeout = std::chrono::seconds(absl::GetFlag(FLAGS_drain_timeout_s));
  return options;
}

absl::StatusOr<int> Serve(const sigset_t& signals) {
  KDT_ASSIGN_OR_RETURN(CoordinatorOptions options, ReadOptions());
  KDT_ASSIGN_OR_RETURN(const auto coordinator, Coordinator::Create(std::move(options), signals));
  return coordinator->Run();
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
