#include "tests/worker/collective/cuda/rank_processes.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "absl/time/clock.h"
#include "common/status.h"
#include "kdt/kernels/cuda_backend.h"
#include "tests/support/catch.h"

namespace kdt {
namespace {

constexpr unsigned kRankSeconds = 60;
constexpr absl::Duration kDeadline = absl::Seconds(50);  // of all that a group does
constexpr size_t kTextBytes = 1024;

// In a process of its own, so that this one stays free of CUDA.
int CountDevices() {
  const pid_t child = fork();
  if (child == 0) {
    int devices = 0;
    _exit(cudaGetDeviceCount(&devices) == cudaSuccess ? devices : 0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

class MpsDaemon {
 public:
  MpsDaemon() {
    char name[] = "/tmp/kdt-mps-XXXXXX";
    dir_ = mkdtemp(name) == nullptr ? "" : name;
    setenv("CUDA_MPS_PIPE_DIRECTORY", dir_.c_str(), 1);
    setenv("CUDA_MPS_LOG_DIRECTORY", dir_.c_str(), 1);
    runs_ = !dir_.empty() && std::system("nvidia-cuda-mps-control -d >/dev/null 2>&1") == 0;
  }
  ~MpsDaemon() {
    if (runs_) (void)!std::system("echo quit | nvidia-cuda-mps-control >/dev/null 2>&1");
    std::error_code ignored;
    if (!dir_.empty()) std::filesystem::remove_all(dir_, ignored);
  }
  bool runs() const { return runs_; }

 private:
  std::string dir_;
  bool runs_ = false;
};

}  // namespace

Placement PlacementFor(int ranks) {
  static const int devices = CountDevices();
  if (devices == 0) return {false, Gpus::kShared, "no GPU"};
  if (ranks <= devices) return {true, Gpus::kOwn, ""};
  static const MpsDaemon mps;
  if (!mps.runs()) return {false, Gpus::kShared, "fewer GPUs than ranks, and no MPS daemon could be started"};
  return {true, Gpus::kShared, ""};
}

std::vector<std::string> RunRanks(int ranks, Gpus gpus, CollectiveKind kind,
                                  const std::function<std::string(const RankSetup&)>& body) {
  static int counter = 0;
  const std::string id = "cuda-test-" + std::to_string(getpid()) + "-" + std::to_string(++counter);
  const size_t bytes = static_cast<size_t>(ranks) * kTextBytes;
  auto* const texts =
      static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = fork();
    if (child != 0) {
      children.push_back(child);
      continue;
    }
    alarm(kRankSeconds);
    if (gpus == Gpus::kOwnOnly) setenv("CUDA_VISIBLE_DEVICES", std::to_string(rank).c_str(), 1);
    RankSetup setup{rank, ranks, gpus == Gpus::kOwn ? rank : 0, {id, rank, ranks, kind}};
    setup.options.buffer_bytes = size_t{1} << 20;
    std::string text = "no stream";
    if (cudaSetDevice(setup.device) == cudaSuccess &&
        cudaStreamCreateWithFlags(&setup.options.stream, cudaStreamNonBlocking) == cudaSuccess) {
      text = body(setup);
    }
    std::strncpy(texts + static_cast<size_t>(rank) * kTextBytes, text.c_str(), kTextBytes - 1);
    _exit(0);
  }
  std::vector<std::string> told;
  for (int rank = 0; rank < ranks; ++rank) {
    int status = 0;
    waitpid(children[static_cast<size_t>(rank)], &status, 0);
    told.push_back(WIFEXITED(status) ? texts + static_cast<size_t>(rank) * kTextBytes : "killed");
  }
  munmap(texts, bytes);
  return told;
}

void CheckRankProcesses(int ranks, const std::function<absl::Status(const RankSetup&)>& body) {
  const Placement placement = PlacementFor(ranks);
  if (!placement.possible) {
    WARN("skipped with " << ranks << " ranks: " << placement.reason);
    return;
  }
  const auto told = RunRanks(ranks, placement.gpus, CollectiveKind::kIpc,
                             [&](const RankSetup& setup) { return std::string(body(setup).message()); });
  for (int rank = 0; rank < ranks; ++rank) {
    INFO(ranks << " ranks, rank " << rank);
    CHECK(told[static_cast<size_t>(rank)] == "");
  }
}

void CheckRanks(int ranks, const std::function<absl::Status(CudaCollective&)>& test) {
  CheckRankProcesses(ranks, [&](const RankSetup& setup) -> absl::Status {
    KDT_ASSIGN_OR_RETURN(const auto collective, CudaCollective::Make(setup.options));
    collective->SetDeadline(absl::Now() + kDeadline);
    KDT_RETURN_IF_ERROR(test(*collective));
    // Nobody leaves while others are still at it.
    return collective->exchange().Agree(absl::OkStatus());
  });
}

void CheckBackedRanks(int ranks, int64_t workspace_bytes,
                      const std::function<absl::Status(kernels::Backend&, CudaCollective&)>& test) {
  CheckRankProcesses(ranks, [&](const RankSetup& setup) -> absl::Status {
    kernels::CudaBackendOptions backend_options;
    backend_options.device = setup.device;
    backend_options.workspace_bytes = workspace_bytes;
    KDT_ASSIGN_OR_RETURN(const auto backend, kernels::MakeCudaBackend(backend_options));
    CudaCollectiveOptions options = setup.options;
    options.stream = static_cast<cudaStream_t>(backend->stream());
    KDT_ASSIGN_OR_RETURN(const auto collective, CudaCollective::Make(options));
    collective->SetDeadline(absl::Now() + kDeadline);
    KDT_RETURN_IF_ERROR(test(*backend, *collective));
    return collective->exchange().Agree(absl::OkStatus());
  });
}

}  // namespace kdt
