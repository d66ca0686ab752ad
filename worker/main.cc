// kdt-worker: one tensor-parallel rank behind the gRPC service kdt.v1.Worker.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "common/address.h"
#include "common/clock.h"
#include "common/flags.h"
#include "common/group_security.h"
#include "common/log.h"
#include "common/metrics.h"
#include "common/process.h"
#include "worker/backend_factory.h"
#include "worker/collective/factory.h"
#include "worker/engine/engine.h"
#include "worker/service/engine_thread.h"
#include "worker/service/metrics.h"
#include "worker/service/worker_service.h"

ABSL_FLAG(std::string, model, "", "folder of the target checkpoint");
ABSL_FLAG(std::string, drafter, "", "folder of the DFlash drafter; empty: none");
ABSL_FLAG(int64_t, draft_window, 0, "context positions the drafter sees, counted from the end; 0: all");
ABSL_FLAG(double, draft_rope_factor, 0, "drafter's rope attention factor; 0: what its config says");
ABSL_FLAG(int, rank, 0, "this worker's rank, 0 .. tp - 1");
ABSL_FLAG(int, tp, 1, "tensor-parallel size");
ABSL_FLAG(std::string, backend, "cpu", "device to run on");
ABSL_FLAG(int, device, -1, "GPU to run on (cuda only); -1: the rank modulo the number of GPUs");
ABSL_FLAG(
    std::string, collective, "auto",
    "how ranks sum: auto; shm (cpu); ipc or nccl (cuda), where auto takes the faster one for each size");
ABSL_FLAG(int, threads, 1, "compute threads (cpu only)");
ABSL_FLAG(std::string, listen, "127.0.0.1:0",
          "HOST:PORT or unix:PATH of the coordinator's side; port 0 takes a free one");
ABSL_FLAG(int, metrics_port, -1, "Prometheus port; 0 takes a free one; -1: none");
ABSL_FLAG(std::string, metrics_host, "127.0.0.1", "address that the Prometheus port is bound to");
ABSL_FLAG(std::string, kv_dtype, "",
          "type of KV rows: f32 or bf16; empty: that of the backend's activations");
ABSL_FLAG(int64_t, kv_slots, 0, "KV slots; 0: as many as fit kv_bytes");
ABSL_FLAG(int64_t, kv_bytes, int64_t{1} << 30, "bytes for the KV pools of target and drafter");
ABSL_FLAG(int64_t, max_rows, 1024, "most rows a step");
ABSL_FLAG(int64_t, max_context, 0, "longest sequence; 0: the model's limit");
ABSL_FLAG(int64_t, max_sequences, 256, "most sequences alive at once");
ABSL_FLAG(int64_t, max_tree_nodes, 256, "most nodes a tree, root included");
ABSL_FLAG(std::string, moe, "tensor",
          "routed experts: tensor (each rank has a slice of every expert) or expert (whole experts)");
ABSL_FLAG(std::string, attention, "fast",
          "fast; reference: the slow and plain kernel; validate: fast, and compared with the reference on a "
          "sample of steps. The cpu's kernel is its own reference");
ABSL_FLAG(
    bool, strict, false,
    "a step that allocates, frees or copies pageable memory behind the start fails, with the call named "
    "(cuda only)");
ABSL_FLAG(int64_t, validate_every, 64, "with --attention=validate: compare every so many steps");
ABSL_FLAG(std::string, log_level, "info", "trace, debug, info, warn or error");
ABSL_FLAG(bool, die_with_parent, false, "end when the process that started this one ends");

namespace kdt {
namespace {

constexpr int64_t kProgressEveryMicros = 1000000;
// How long a worker whose checkpoint cannot be loaded stays to tell the coordinator why.
constexpr std::chrono::milliseconds kTellLoadError{1500};
// How long the end waits for the step in progress, and for its answer to leave.
constexpr absl::Duration kDrainTimeout = absl::Seconds(3);
constexpr std::chrono::milliseconds kAnswerGrace{100};

// For who started this process, in one line (kdt-launch reads it).
void TellEnd(std::string why) {
  std::replace(why.begin(), why.end(), '\n', ' ');
  std::printf("kdt-worker ends: %s\n", why.c_str());
  std::fflush(stdout);
}

int Fail(absl::string_view message) {
  TellEnd(std::string(message));
  std::fprintf(stderr, "kdt-worker: %.*s\n", static_cast<int>(message.size()), message.data());
  return 2;
}

absl::Status CheckFlagsApply() {
  const bool cpu = absl::GetFlag(FLAGS_backend) == "cpu";
  const bool drafts = !absl::GetFlag(FLAGS_drafter).empty();
  const bool validates = absl::GetFlag(FLAGS_attention) == "validate";
  struct Need {
    const char* flag;
    bool met;
    const char* what;
  };
  for (const auto& [flag, met, what] :
       {Need{"strict", !cpu, "without --backend=cuda"}, Need{"device", !cpu, "without --backend=cuda"},
        Need{"threads", cpu, "without --backend=cpu"}, Need{"draft_window", drafts, "without --drafter"},
        Need{"draft_rope_factor", drafts, "without --drafter"},
        Need{"validate_every", validates, "without --attention=validate"}}) {
    if (!met && FlagIsSet(flag)) return FlagDoesNothing(flag, what);
  }
  return absl::OkStatus();
}

absl::StatusOr<EngineOptions> OptionsFromFlags() {
  EngineOptions options;
  options.model_dir = absl::GetFlag(FLAGS_model);
  options.drafter_dir = absl::GetFlag(FLAGS_drafter);
  options.rank = absl::GetFlag(FLAGS_rank);
  options.tp = absl::GetFlag(FLAGS_tp);
  options.kv_slots = absl::GetFlag(FLAGS_kv_slots);
  options.kv_bytes = absl::GetFlag(FLAGS_kv_bytes);
  options.max_rows = absl::GetFlag(FLAGS_max_rows);
  options.max_context = absl::GetFlag(FLAGS_max_context);
  options.max_sequences = absl::GetFlag(FLAGS_max_sequences);
  options.max_tree_nodes = absl::GetFlag(FLAGS_max_tree_nodes);
  options.draft_window = absl::GetFlag(FLAGS_draft_window);
  options.draft_rope_factor = static_cast<float>(absl::GetFlag(FLAGS_draft_rope_factor));
  const std::string attention = absl::GetFlag(FLAGS_attention);
  if (attention == "reference") {
    options.attention = AttentionMode::kReference;
  } else if (attention == "validate") {
    options.attention = AttentionMode::kValidate;
  } else if (attention != "fast") {
    return absl::InvalidArgumentError(
        absl::StrCat("--attention: \"", attention, "\" is none of fast, reference and validate"));
  }
  options.validate_every = absl::GetFlag(FLAGS_validate_every);
  options.strict = absl::GetFlag(FLAGS_strict);
  const auto check = [](absl::string_view flag, int64_t value, int64_t least, int64_t most) {
    if (value >= least && value <= most) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("--", flag, ": ", value, " is not in ", least, "..", most));
  };
  if (options.model_dir.empty()) return absl::InvalidArgumentError("--model is required");
  for (const absl::Status& status :
       {check("tp", options.tp, 1, 64), check("rank", options.rank, 0, options.tp - 1),
        check("threads", absl::GetFlag(FLAGS_threads), 1, 1024),
        check("device", absl::GetFlag(FLAGS_device), -1, 1023),
        check("kv_slots", options.kv_slots, 0, INT32_MAX - 1),
        check("kv_bytes", options.kv_bytes, 1 << 16, int64_t{1} << 46),
        check("max_rows", options.max_rows, 1, 65536),
        check("max_context", options.max_context, 0, int64_t{1} << 24),
        check("max_sequences", options.max_sequences, 1, 65536),
        check("max_tree_nodes", options.max_tree_nodes, 1, 4096),
        check("validate_every", options.validate_every, 1, int64_t{1} << 32),
        check("metrics_port", absl::GetFlag(FLAGS_metrics_port), -1, 65535)}) {
    if (!status.ok()) return status;
  }
  // One token of prompt and one of answer.
  for (const auto& [flag, value] :
       {std::pair{"kv_slots", options.kv_slots}, std::pair{"max_context", options.max_context}}) {
    if (value == 1)
      return absl::InvalidArgumentError(absl::StrCat("--", flag, ": 1 is too little for an answer"));
  }
  const std::string moe = absl::GetFlag(FLAGS_moe);
  if (moe != "tensor" && moe != "expert") {
    return absl::InvalidArgumentError(absl::StrCat("--moe: \"", moe, "\" is neither tensor nor expert"));
  }
  options.moe_sharding = moe == "expert" ? MoeSharding::kExpert : MoeSharding::kTensor;
  const std::string kv_dtype = absl::GetFlag(FLAGS_kv_dtype);
  if (!kv_dtype.empty() && kv_dtype != "f32" && kv_dtype != "bf16") {
    return absl::InvalidArgumentError(absl::StrCat("--kv_dtype: \"", kv_dtype, "\" is neither f32 nor bf16"));
  }
  return options;
}

absl::StatusOr<std::unique_ptr<Engine>> LoadWithProgress(const EngineOptions& options,
                                                         kernels::Backend* backend, WorkerService* service,
                                                         WorkerMetrics* metrics) {
  const int64_t start = MonotonicMicros();
  int64_t last = start;
  uint64_t bytes = 0;
  const auto log = [&](uint64_t loaded, uint64_t total) {
    const double seconds = static_cast<double>(MonotonicMicros() - start) * 1e-6;
    const double mb = static_cast<double>(loaded) / 1e6;
    spdlog::info("loaded {:.1f} of {:.1f} MB, {:.0f} MB/s", mb, static_cast<double>(total) / 1e6,
                 seconds > 0 ? mb / seconds : 0);
  };
  auto engine = Engine::Load(options, backend, [&](uint64_t loaded, uint64_t total) {
    service->SetProgress(loaded, total);
    bytes = loaded;
    if (MonotonicMicros() - last < kProgressEveryMicros) return;
    last = MonotonicMicros();
    log(loaded, total);
  });
  if (engine.ok()) {
    log(bytes, bytes);
    metrics->SetLoaded(static_cast<double>(MonotonicMicros() - start) * 1e-6, bytes);
    v1::DescribeResponse description;
    (*engine)->Describe(&description);
    metrics->SetKvSlots(description.kv_slots_total());
    // All memory is taken while loading, so this holds for good.
    if (const auto memory = backend->memory(); memory.has_value()) {
      metrics->SetDeviceMemory(memory->used_bytes, memory->total_bytes);
    }
  }
  return engine;
}

// Until one of `signals` comes; behind kEndWhenUnused, until no coordinator uses this rank.
void AwaitEnd(const sigset_t& signals, const WorkerService& service) {
  bool when_unused = false;
  while (true) {
    const timespec slice{0, 100'000'000};
    const int signal = when_unused ? sigtimedwait(&signals, nullptr, &slice) : sigwaitinfo(&signals, nullptr);
    if (signal > 0 && signal != kEndWhenUnused) return;
    when_unused = when_unused || signal == kEndWhenUnused;
    if (!when_unused || service.used()) continue;
    spdlog::info("no coordinator uses this rank: it ends");
    return;
  }
}

int Run(const sigset_t& signals) {
  absl::StatusOr<EngineOptions> options = OptionsFromFlags();
  if (!options.ok()) return Fail(options.status().message());
  if (const absl::Status apply = CheckFlagsApply(); !apply.ok()) return Fail(apply.message());
  const auto listen = ParseAddress(absl::GetFlag(FLAGS_listen), "--listen");
  if (!listen.ok()) return Fail(listen.status().message());
  const auto tls = GroupTlsFromFlags();
  if (!tls.ok()) return Fail(tls.status().message());
  const absl::Status allowed =
      CheckGroupAddress(*listen, "--listen", tls->has_value(), InsecureGroupAllowed());
  if (!allowed.ok()) return Fail(allowed.message());
  const auto kind = ParseCollectiveKind(absl::GetFlag(FLAGS_collective), absl::GetFlag(FLAGS_backend));
  if (!kind.ok()) return Fail(kind.status().message());
  auto backend =
      MakeBackend(absl::GetFlag(FLAGS_backend),
                  {absl::GetFlag(FLAGS_threads), absl::GetFlag(FLAGS_device), absl::GetFlag(FLAGS_rank)});
  if (!backend.ok()) return Fail(backend.status().message());
  const std::string kv_dtype = absl::GetFlag(FLAGS_kv_dtype);
  options->kv_dtype = kv_dtype.empty()    ? (*backend)->activation_dtype()
                      : kv_dtype == "f32" ? kernels::DType::kF32
                                          : kernels::DType::kBF16;

  const kernels::DeviceFacts facts = (*backend)->facts();
  const WorkerIdentity identity{options->rank, options->tp,    (*backend)->name(), (*backend)->device_name(),
                                facts.arch,    facts.gpu_uuid, facts.pci_bus_id};
  auto registry = std::make_shared<prometheus::Registry>();
  WorkerMetrics metrics(identity, registry);
  std::unique_ptr<MetricsServer> metrics_server;
  if (const int port = absl::GetFlag(FLAGS_metrics_port); port >= 0) {
    auto started = MetricsServer::Start({absl::GetFlag(FLAGS_metrics_host), port, ""}, registry);
    if (!started.ok()) return Fail(started.status().message());
    metrics_server = *std::move(started);
    spdlog::info("metrics on {}:{}", absl::GetFlag(FLAGS_metrics_host), metrics_server->port());
  }

  const Engine* loaded_engine = nullptr;  // set before the first step
  const auto make_collective = [&](const v1::JoinGroupRequest& request, const std::atomic<bool>* cancelled) {
    return MakeCollective(
        {request.collective_id(), static_cast<int>(request.rank()), static_cast<int>(request.tp()),
         absl::Milliseconds(request.timeout_ms()), cancelled},
        *kind, **backend);
  };
  EngineThread engine(identity.rank, identity.tp, make_collective,
                      [&](const v1::StepRequest& request, const v1::StepResponse& response) {
                        metrics.Observe(request, response);
                        if (loaded_engine != nullptr) metrics.SetStats(loaded_engine->stats());
                      });
  // Every way to end goes through SIGTERM, which the main thread waits for below.
  std::atomic<int> exit_status{0};
  WorkerService service(identity, &engine, [](const std::string& reason) {
    TellEnd(absl::StrCat("its coordinator ended it: ", reason));
    kill(getpid(), SIGTERM);
  });

  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(listen->ToString(),
                           tls->has_value() ? ServerCredentials(**tls) : grpc::InsecureServerCredentials(),
                           &port);
  ConfigureWorkerServer(&builder);
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) return Fail(absl::StrCat("--listen: cannot bind ", listen->ToString()));
  Address bound = *listen;
  if (!bound.is_unix()) bound.port = port;
  std::printf("kdt-worker ready listen=%s\n", bound.ToString().c_str());
  std::fflush(stdout);

  std::atomic<bool> loading{true};
  std::thread loader([&] {
    auto loaded = LoadWithProgress(*options, backend->get(), &service, &metrics);
    if (loaded.ok()) {
      loaded_engine = loaded->get();
      engine.SetEngine(*std::move(loaded));
      loading = false;
      return;
    }
    const std::string error(loaded.status().message());
    spdlog::error("cannot load: {}", error);
    TellEnd(absl::StrCat("cannot load: ", error));
    service.SetLoadError(error);
    exit_status = 1;
    std::this_thread::sleep_for(kTellLoadError);
    loading = false;
    kill(getpid(), SIGTERM);
  });

  AwaitEnd(signals, service);
  // The step in progress is finished and its answer sent; then open streams are cancelled.
  const auto drained = std::make_shared<absl::Notification>();
  engine.Drain([drained](uint64_t) { drained->Notify(); });
  drained->WaitForNotificationWithTimeout(kDrainTimeout);
  server->Shutdown(std::chrono::system_clock::now() + kAnswerGrace);
  if (loading) {
    spdlog::info("ended while loading");
    _exit(exit_status);  // nothing interrupts a load, and there is nothing to tidy up
  }
  loader.join();
  return exit_status;
}

}  // namespace
}  // namespace kdt

int main(int argc, char** argv) {
  kdt::ParseFlags(argc, argv, "one tensor-parallel rank of kdtree-engine; kdt-launch starts a whole group");
  if (absl::GetFlag(FLAGS_die_with_parent) && !kdt::DieWithParent()) return 1;
  const std::string name = absl::StrCat("worker ", absl::GetFlag(FLAGS_rank));
  if (const absl::Status status = kdt::InitLogging(name, absl::GetFlag(FLAGS_log_level)); !status.ok()) {
    return kdt::Fail(status.message());
  }
  kdt::PrepareCollectives();
  return kdt::Run(kdt::BlockSignals({SIGTERM, SIGINT, kdt::kEndWhenUnused}));
}
