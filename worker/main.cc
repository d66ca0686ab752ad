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

#include "absl/flags/declare.h"
#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "common/clock.h"
#include "common/flags.h"
#include "common/log.h"
#include "common/metrics.h"
#include "common/process.h"
#include "common/status.h"
#include "worker/collective/factory.h"
#include "worker/service/engine_thread.h"
#include "worker/service/metrics.h"
#include "worker/service/worker_service.h"
#include "worker/worker_flags.h"

ABSL_DECLARE_FLAG(int, rank);
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

class RankProcess {
 public:
  static absl::StatusOr<std::unique_ptr<RankProcess>> Start(WorkerOptions options);
  // Loads, and serves until one of `signals` comes. Returns the exit status.
  int Run(const sigset_t& signals);

 private:
  RankProcess(WorkerOptions options, std::unique_ptr<kernels::Backend> backend);
  absl::Status StartServers();
  void Load();

  const WorkerOptions options_;
  const std::unique_ptr<kernels::Backend> backend_;
  const WorkerIdentity identity_;
  const std::shared_ptr<prometheus::Registry> registry_ = std::make_shared<prometheus::Registry>();
  WorkerMetrics metrics_;
  std::unique_ptr<MetricsServer> metrics_server_;
  const Engine* loaded_engine_ = nullptr;  // set before the first step
  EngineThread engine_;
  // Every way to end goes through SIGTERM, which Run waits for.
  std::atomic<int> exit_status_{0};
  std::atomic<bool> loading_{true};
  WorkerService service_;
  std::unique_ptr<grpc::Server> server_;
};

WorkerIdentity Identity(const WorkerOptions& options, const kernels::Backend& backend) {
  const kernels::DeviceFacts facts = backend.facts();
  return {options.engine.rank, options.engine.tp, backend.name(),  backend.device_name(),
          facts.arch,          facts.gpu_uuid,    facts.pci_bus_id};
}

RankProcess::RankProcess(WorkerOptions options, std::unique_ptr<kernels::Backend> backend)
    : options_(std::move(options)),
      backend_(std::move(backend)),
      identity_(Identity(options_, *backend_)),
      metrics_(identity_, registry_),
      engine_(
          identity_.rank, identity_.tp,
          [this](const v1::JoinGroupRequest& request, const std::atomic<bool>* cancelled) {
            return MakeCollective(
                {request.collective_id(), static_cast<int>(request.rank()), static_cast<int>(request.tp()),
                 absl::Milliseconds(request.timeout_ms()), cancelled},
                options_.collective, *backend_);
          },
          [this](const v1::StepRequest& request, const v1::StepResponse& response) {
            metrics_.Observe(request, response);
            if (loaded_engine_ != nullptr) metrics_.SetStats(loaded_engine_->stats());
          }),
      service_(identity_, &engine_, [](const std::string& reason) {
        TellEnd(absl::StrCat("its coordinator ended it: ", reason));
        kill(getpid(), SIGTERM);
      }) {}

absl::StatusOr<std::unique_ptr<RankProcess>> RankProcess::Start(WorkerOptions options) {
  KDT_ASSIGN_OR_RETURN(auto backend, MakeBackend(options.backend, options.backend_options));
  options.engine.kv_dtype = options.kv_dtype.value_or(backend->activation_dtype());
  std::unique_ptr<RankProcess> process(new RankProcess(std::move(options), std::move(backend)));
  KDT_RETURN_IF_ERROR(process->StartServers());
  return process;
}

absl::Status RankProcess::StartServers() {
  if (options_.has_metrics) {
    KDT_ASSIGN_OR_RETURN(metrics_server_, MetricsServer::Start(options_.metrics, registry_));
    spdlog::info("metrics on {}:{}", options_.metrics.host, metrics_server_->port());
  }
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(
      options_.listen.ToString(),
      options_.tls.has_value() ? ServerCredentials(*options_.tls) : grpc::InsecureServerCredentials(), &port);
  ConfigureWorkerServer(&builder);
  builder.RegisterService(&service_);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) {
    return absl::UnavailableError(absl::StrCat("--listen: cannot bind ", options_.listen.ToString()));
  }
  Address bound = options_.listen;
  if (!bound.is_unix()) bound.port = port;
  std::printf("kdt-worker ready listen=%s\n", bound.ToString().c_str());
  std::fflush(stdout);
  return absl::OkStatus();
}

void RankProcess::Load() {
  auto loaded = LoadWithProgress(options_.engine, backend_.get(), &service_, &metrics_);
  if (loaded.ok()) {
    loaded_engine_ = loaded->get();
    engine_.SetEngine(*std::move(loaded));
    loading_ = false;
    return;
  }
  const std::string error(loaded.status().message());
  spdlog::error("cannot load: {}", error);
  TellEnd(absl::StrCat("cannot load: ", error));
  service_.SetLoadError(error);
  exit_status_ = 1;
  std::this_thread::sleep_for(kTellLoadError);
  loading_ = false;
  kill(getpid(), SIGTERM);
}

int RankProcess::Run(const sigset_t& signals) {
  std::thread loader([this] { Load(); });
  AwaitEnd(signals, service_);
  // The step in progress is finished and its answer sent; then open streams are cancelled.
  const auto drained = std::make_shared<absl::Notification>();
  engine_.Drain([drained](uint64_t) { drained->Notify(); });
  drained->WaitForNotificationWithTimeout(kDrainTimeout);
  server_->Shutdown(std::chrono::system_clock::now() + kAnswerGrace);
  if (loading_) {
    spdlog::info("ended while loading");
    _exit(exit_status_);  // nothing interrupts a load, and there is nothing to tidy up
  }
  loader.join();
  return exit_status_;
}

int Run(const sigset_t& signals) {
  absl::StatusOr<WorkerOptions> options = WorkerOptionsFromFlags();
  if (!options.ok()) return Fail(options.status().message());
  const auto process = RankProcess::Start(*std::move(options));
  if (!process.ok()) return Fail(process.status().message());
  return (*process)->Run(signals);
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
