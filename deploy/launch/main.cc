// kdt-launch: starts a coordinator and its tensor-parallel workers on this host and ends them together.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/reflection.h"
#include "absl/flags/usage.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/types/span.h"
#include "common/address.h"
#include "common/flags.h"
#include "common/log.h"
#include "common/process.h"
#include "common/status.h"
#include "deploy/launch/group_supervisor.h"

ABSL_FLAG(std::string, model, "", "folder of the target checkpoint");
ABSL_FLAG(std::string, drafter, "", "folder of the DFlash drafter; empty: no speculation");
ABSL_FLAG(int64_t, draft_window, 0, "context positions the drafter sees, counted from the end; 0: all");
ABSL_FLAG(double, draft_rope_factor, 0, "drafter's rope attention factor; 0: what its config says");
ABSL_FLAG(std::string, role, "all",
          "all: workers and coordinator; workers: the workers alone, for a coordinator that runs elsewhere");
ABSL_FLAG(int, tp, 8, "tensor-parallel size: worker processes");
ABSL_FLAG(std::string, socket_dir, "",
          "with --role=workers: folder in which rank r listens as rank<r>.sock, shared with the coordinator");
ABSL_FLAG(
    std::string, worker_listen, "",
    "with --role=workers: HOST:PORT of this host's first rank instead of sockets, the next takes PORT + 1");
ABSL_FLAG(int, ranks_per_node, 0, "with --role=workers: ranks that run on this host; 0: all");
ABSL_FLAG(int, node_index, 0, "with --role=workers: this host's place in the group; it decides its ranks");
ABSL_FLAG(std::string, backend, "cpu", "worker backend: cpu or cuda");
ABSL_FLAG(
    std::string, devices, "",
    "with --backend=cuda: GPUs of the ranks here, in turn, as 0,1,2; empty: rank i of this host has GPU i");
ABSL_FLAG(std::string, listen, "127.0.0.1:50051", "HOST:PORT of the public API; port 0 takes a free one");
ABSL_FLAG(std::string, tls_cert, "", "PEM file with the public port's certificate; empty: plaintext");
ABSL_FLAG(std::string, tls_key, "", "PEM file with the key of --tls_cert");
ABSL_FLAG(std::string, tls_client_ca, "",
          "PEM file with authorities of which clients must show a certificate; empty: they need none");
ABSL_FLAG(std::string, api_keys_file, "", "file with one API key a line; empty: calls need no key");
ABSL_FLAG(bool, allow_insecure_api_keys, false,
          "accept API keys in plaintext from other hosts, as behind a proxy that ends TLS");
ABSL_FLAG(std::string, health_listen, "", "HOST:PORT of a plaintext health-only port; empty: none");
ABSL_FLAG(
    int, metrics_port, -1,
    "Prometheus port of the coordinator, rank r has the port P + 1 + r; 0: each takes a free one; -1: none");
ABSL_FLAG(std::string, metrics_host, "", "address of the Prometheus ports; empty: the programs' default");
ABSL_FLAG(int, threads, 0,
          "with --backend=cpu: compute threads a worker; 0: the machine's cores shared out over the ranks");
ABSL_FLAG(std::string, kv_dtype, "", "f32 or bf16; empty: the backend's default");
ABSL_FLAG(int64_t, kv_bytes, 0, "bytes of KV pool a rank; 0: the worker's default");
ABSL_FLAG(int64_t, kv_slots, 0, "KV slots a rank instead of kv_bytes; 0: by bytes");
ABSL_FLAG(int64_t, max_context, 0, "longest context in tokens; 0: the model's");
ABSL_FLAG(int, max_rows, 0, "most rows (prompt tokens and tree nodes) a step; 0: the worker's default");
ABSL_FLAG(int, prefill_chunk, 0, "most prompt tokens of one request a step; 0: the coordinator's default");
ABSL_FLAG(int, max_waiting, 0,
          "requests that may wait before new ones are refused; 0: the coordinator's default");
ABSL_FLAG(int, step_timeout_ms, 0, "deadline of one step; 0: the coordinator's default");
ABSL_FLAG(std::string, budget, "",
          "drafted nodes a tree: auto or a number; empty: the coordinator's default");
ABSL_FLAG(std::string, tree, "", "best-first, spine-first or chain; empty: the coordinator's default");
ABSL_FLAG(std::string, record_trees, "", "write the first verified trees to this file, for kdt tree to draw");
ABSL_FLAG(int, drain_timeout_s, 30, "on SIGTERM, how long running requests may go on");
ABSL_FLAG(std::string, on_loss, "exit",
          "when a worker dies: exit (end the group) or restart (all workers together)");
ABSL_FLAG(
    int, max_restarts, 5,
    "with --on_loss=restart: losses within ten minutes that are mended; at one more the launcher gives up");
ABSL_FLAG(std::string, log_level, "info", "trace, debug, info, warn or error");

namespace {

// Fills in which ranks run here and where they listen.
absl::Status ReadPlacement(kdt::GroupOptions* options) {
  const std::string role = absl::GetFlag(FLAGS_role);
  if (role != "all" && role != "workers") {
    return absl::InvalidArgumentError(absl::StrCat("--role: \"", role, "\" is neither all nor workers"));
  }
  options->role = role == "all" ? kdt::Role::kAll : kdt::Role::kWorkers;
  options->socket_dir = absl::GetFlag(FLAGS_socket_dir);
  const std::string listen = absl::GetFlag(FLAGS_worker_listen);
  const int per_node = absl::GetFlag(FLAGS_ranks_per_node);
  const int node = absl::GetFlag(FLAGS_node_index);
  if (options->role == kdt::Role::kAll) {
    if (!options->socket_dir.empty() || !listen.empty() || per_node != 0 || node != 0) {
      return absl::InvalidArgumentError(
          "--socket_dir, --worker_listen, --ranks_per_node and --node_index need --role=workers");
    }
    options->ranks = options->tp;
    return absl::OkStatus();
  }
  if (options->socket_dir.empty() == listen.empty()) {
    return absl::InvalidArgumentError("--role=workers needs one of --socket_dir and --worker_listen");
  }
  if (!options->socket_dir.empty() && !std::filesystem::is_directory(options->socket_dir)) {
    return absl::InvalidArgumentError(absl::StrCat("--socket_dir: no folder ", options->socket_dir));
  }
  options->ranks = per_node == 0 ? options->tp : per_node;
  if (options->ranks < 1 || options->tp % options->ranks != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--ranks_per_node: ", per_node, " does not divide --tp ", options->tp));
  }
  if (node < 0 || node >= options->tp / options->ranks) {
    return absl::InvalidArgumentError(
        absl::StrCat("--node_index: ", node, " is not in 0..", options->tp / options->ranks - 1));
  }
  options->first_rank = node * options->ranks;
  if (listen.empty()) return absl::OkStatus();
  const absl::StatusOr<kdt::Address> address = kdt::ParseAddress(listen, "--worker_listen");
  if (!address.ok()) return address.status();
  if (address->is_unix() || address->port == 0 || address->port + options->ranks > 65536) {
    return absl::InvalidArgumentError(
        absl::StrCat("--worker_listen: ", listen, " is not HOST:PORT with a port for every rank"));
  }
  options->worker_host = address->host;
  options->worker_port = address->port;
  return absl::OkStatus();
}

// Which GPU each rank has. Ranks that share one need CUDA MPS, or every step waits for time slices.
absl::Status ReadDevices(kdt::GroupOptions* options) {
  const std::string flag = absl::GetFlag(FLAGS_devices);
  const bool cuda = absl::GetFlag(FLAGS_backend) == "cuda";
  if (flag.empty()) {
    for (int i = 0; cuda && i < options->ranks; ++i) options->devices.push_back(i);
    return absl::OkStatus();
  }
  if (!cuda) return absl::InvalidArgumentError("--devices needs --backend=cuda");
  for (absl::string_view word : absl::StrSplit(flag, ',')) {
    int device = 0;
    if (!absl::SimpleAtoi(word, &device) || device < 0 || device > 1023) {
      return absl::InvalidArgumentError(absl::StrCat("--devices: \"", word, "\" is not the number of a GPU"));
    }
    options->devices.push_back(device);
  }
  return absl::OkStatus();
}

// Flags that the programs have too, by the same name. They are handed on when they are set, so that each
// default is told in one place only.
constexpr const char* kForWorkers[] = {"drafter",     "draft_window", "draft_rope_factor",
                                       "kv_dtype",    "kv_bytes",     "kv_slots",
                                       "max_context", "max_rows",     "metrics_host"};
constexpr const char* kForCoordinator[] = {"drafter",       "metrics_host",    "prefill_chunk",
                                           "max_waiting",   "step_timeout_ms", "budget",
                                           "tree",          "tls_cert",        "tls_key",
                                           "tls_client_ca", "api_keys_file",   "allow_insecure_api_keys",
                                           "health_listen", "record_trees",    "listen"};

void PassOn(std::vector<std::string>& args, absl::Span<const char* const> names) {
  for (const char* name : names) {
    if (kdt::FlagIsSet(name))
      args.push_back(absl::StrCat("--", name, "=", absl::FindCommandLineFlag(name)->CurrentValue()));
  }
}

absl::Status CheckFlagsApply() {
  if (absl::GetFlag(FLAGS_drafter).empty()) {
    for (const char* name : {"draft_window", "draft_rope_factor", "budget", "tree", "record_trees"}) {
      if (kdt::FlagIsSet(name)) return kdt::FlagDoesNothing(name, "without --drafter");
    }
  }
  if (absl::GetFlag(FLAGS_on_loss) == "exit" && kdt::FlagIsSet("max_restarts")) {
    return kdt::FlagDoesNothing("max_restarts", "without --on_loss=restart");
  }
  if (absl::GetFlag(FLAGS_role) == "workers") {
    for (const char* name : kForCoordinator) {
      if (kdt::FlagIsSet(name) && !absl::c_linear_search(kForWorkers, absl::string_view(name))) {
        return kdt::FlagDoesNothing(name, "with --role=workers: it is a flag of the coordinator");
      }
    }
  }
  return absl::OkStatus();
}

absl::Status CheckRange(const char* flag, int value, int least, int most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", flag, ": ", value, " is not in ", least, "..", most));
}

absl::Status CheckFolder(const char* flag, const std::string& path) {
  if (std::filesystem::is_directory(path)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", flag, ": no folder ", path));
}

absl::Status CheckFlags() {
  const std::string model = absl::GetFlag(FLAGS_model), drafter = absl::GetFlag(FLAGS_drafter);
  if (model.empty()) return absl::InvalidArgumentError("--model is required");
  KDT_RETURN_IF_ERROR(CheckFolder("model", model));
  if (!drafter.empty()) KDT_RETURN_IF_ERROR(CheckFolder("drafter", drafter));
  KDT_RETURN_IF_ERROR(CheckFlagsApply());
  KDT_RETURN_IF_ERROR(CheckRange("tp", absl::GetFlag(FLAGS_tp), 1, 64));
  KDT_RETURN_IF_ERROR(CheckRange("drain_timeout_s", absl::GetFlag(FLAGS_drain_timeout_s), 0, 86400));
  KDT_RETURN_IF_ERROR(CheckRange("threads", absl::GetFlag(FLAGS_threads), 0, 1024));
  if (absl::GetFlag(FLAGS_max_restarts) < 0) return absl::InvalidArgumentError("--max_restarts: negative");
  const int port = absl::GetFlag(FLAGS_metrics_port);
  if (port < -1 || port + absl::GetFlag(FLAGS_tp) > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("--metrics_port: ", port, " leaves no port for every rank"));
  }
  const std::string on_loss = absl::GetFlag(FLAGS_on_loss);
  if (on_loss != "exit" && on_loss != "restart") {
    return absl::InvalidArgumentError(
        absl::StrCat("--on_loss: \"", on_loss, "\" is neither exit nor restart"));
  }
  return absl::OkStatus();
}

// `worker_flags`: what stands behind the --.
absl::StatusOr<kdt::GroupOptions> ReadOptions(absl::Span<char* const> worker_flags) {
  KDT_RETURN_IF_ERROR(CheckFlags());
  kdt::GroupOptions options;
  options.bin_dir = kdt::ExecutableDir();
  options.tp = absl::GetFlag(FLAGS_tp);
  options.metrics_port = absl::GetFlag(FLAGS_metrics_port);
  options.drain_timeout_s = absl::GetFlag(FLAGS_drain_timeout_s);
  options.max_restarts = absl::GetFlag(FLAGS_max_restarts);
  options.on_loss = absl::GetFlag(FLAGS_on_loss) == "restart" ? kdt::OnLoss::kRestart : kdt::OnLoss::kExit;
  KDT_RETURN_IF_ERROR(ReadPlacement(&options));
  KDT_RETURN_IF_ERROR(ReadDevices(&options));

  const std::string model = absl::StrCat("--model=", absl::GetFlag(FLAGS_model));
  const std::string log_level = absl::StrCat("--log_level=", absl::GetFlag(FLAGS_log_level));
  const std::string backend = absl::GetFlag(FLAGS_backend);
  options.worker_args = {model, absl::StrCat("--backend=", backend), log_level};
  if (backend == "cpu") {
    int threads = absl::GetFlag(FLAGS_threads);
    if (threads == 0)
      threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / options.ranks);
    options.worker_args.push_back(absl::StrCat("--threads=", threads));
  } else if (kdt::FlagIsSet("threads")) {
    spdlog::warn("--threads does nothing without --backend=cpu");
  }
  PassOn(options.worker_args, kForWorkers);
  options.worker_args.insert(options.worker_args.end(), worker_flags.begin(), worker_flags.end());

  options.coordinator_args = {model, log_level};
  PassOn(options.coordinator_args, kForCoordinator);
  return options;
}

int Fail(absl::string_view message) {
  std::fprintf(stderr, "kdt-launch: %.*s\n", static_cast<int>(message.size()), message.data());
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "starts a coordinator and its tensor-parallel workers on this host.\n"
      "kdt-launch --model DIR [--drafter DIR] [--tp N] [--backend cpu|cuda] [--listen HOST:PORT]\n"
      "kdt-launch --role=workers --socket_dir DIR --model DIR [--tp N]\n"
      "Behind a -- stand flags that every worker gets as they are.");
  kdt::ListOwnFlagsInHelp();
  const std::vector<char*> rest = absl::ParseCommandLine(argc, argv);
  const absl::Span<char* const> worker_flags = absl::MakeConstSpan(rest).subspan(1);
  if (!worker_flags.empty() && worker_flags[0][0] != '-') {
    return Fail(absl::StrCat("unexpected argument \"", worker_flags[0], "\""));
  }
  if (const absl::Status status = kdt::InitLogging("launch", absl::GetFlag(FLAGS_log_level)); !status.ok()) {
    return Fail(status.message());
  }
  absl::StatusOr<kdt::GroupOptions> options = ReadOptions(worker_flags);
  if (!options.ok()) return Fail(options.status().message());
  return kdt::GroupSupervisor(*std::move(options)).Run();
}
