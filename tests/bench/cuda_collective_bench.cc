// Time of an all-reduce between GPUs by size and method, in captured graphs of 64 calls, one process a rank.
//
//   cuda_collective_bench [--ranks=8] [--devices=each|same] [--collective=auto] [--json=FILE]
//
// --devices=each gives rank r GPU r; same puts all ranks on GPU 0 (start an MPS daemon for that). Rank 0's
// medians are
// printed; --json writes them, too.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/log.h"
#include "common/status.h"
#include "kdt/kernels/cuda_backend.h"
#include "worker/collective/cuda/cuda_collective.h"
#include "worker/collective/cuda/measure.h"

ABSL_FLAG(int, ranks, 8, "processes");
ABSL_FLAG(std::string, devices, "each", "each: rank r on GPU r; same: all on GPU 0");
ABSL_FLAG(std::string, collective, "auto", "auto, ipc or nccl");
ABSL_FLAG(std::string, json, "", "file for the results");

namespace kdt {
namespace {

constexpr size_t kSmallest = size_t{8} << 10, kLargest = size_t{4} << 20;
constexpr int64_t kHidden = 7168;
constexpr int kCalls = 64, kReplays = 15;
constexpr absl::Duration kLimit = absl::Seconds(60);

// A reduction with the norm behind it, in two kernels and as the collective does it.
struct NormTimes {
  int64_t rows;
  float apart_us, together_us;
};

absl::StatusOr<NormTimes> MeasureNorm(CudaCollective& collective, kernels::Backend& backend, void* memory,
                                      int64_t rows) {
  const auto part = [&](int i) {
    return kernels::MakeTensor(static_cast<char*>(memory) + i * kLargest / 4, kernels::DType::kBF16, rows,
                               kHidden);
  };
  const kernels::RmsNormArgs norm{part(0), part(1), part(3).bf16(), 1e-5f, part(2)};
  NormTimes times{rows, 0, 0};
  KDT_ASSIGN_OR_RETURN(times.apart_us, MeasureCalls(collective, kCalls, kReplays, [&] {
                         return collective.Collective::AllReduceNorm(backend, norm);
                       }));
  KDT_ASSIGN_OR_RETURN(times.together_us, MeasureCalls(collective, kCalls, kReplays, [&] {
                         return collective.AllReduceNorm(backend, norm);
                       }));
  return times;
}

std::string Json(const CudaCollective& collective, const std::vector<ReduceTimes>& times,
                 const std::vector<NormTimes>& norms, double join_ms) {
  std::string text =
      absl::StrCat("{\"ranks\": ", collective.size(), ", \"devices\": \"", absl::GetFlag(FLAGS_devices),
                   "\", \"name\": \"", collective.name(), "\", \"choice\": \"",
                   collective.choice().ToString(), "\", \"join_ms\": ", join_ms, ", \"sizes\": [");
  for (const ReduceTimes& size : times) {
    absl::StrAppend(&text, &size == &times.front() ? "" : ", ", "{\"bytes\": ", size.bytes,
                    ", \"chosen\": \"", ReduceMethodName(collective.choice().Of(size.bytes)), "\"");
    for (int m = 0; m < kReduceMethods; ++m) {
      if (size.micros[m] < 0) continue;
      absl::StrAppendFormat(&text, ", \"%s_us\": %.2f", ReduceMethodName(static_cast<ReduceMethod>(m)),
                            size.micros[m]);
    }
    text += "}";
  }
  text += "], \"norms\": [";
  for (const NormTimes& norm : norms) {
    absl::StrAppendFormat(&text, "%s{\"rows\": %d, \"apart_us\": %.2f, \"together_us\": %.2f}",
                          &norm == &norms.front() ? "" : ", ", norm.rows, norm.apart_us, norm.together_us);
  }
  return text + "]}\n";
}

absl::Status RunRank(const std::string& id, int rank, int ranks) {
  kernels::CudaBackendOptions backend_options;
  backend_options.device = absl::GetFlag(FLAGS_devices) == "each" ? rank : 0;
  backend_options.workspace_bytes = 1 << 20;
  KDT_ASSIGN_OR_RETURN(const std::unique_ptr<kernels::Backend> backend,
                       kernels::MakeCudaBackend(backend_options));
  CudaCollectiveOptions options{id, rank, ranks};
  KDT_ASSIGN_OR_RETURN(options.kind, ParseCollectiveKind(absl::GetFlag(FLAGS_collective), "cuda"));
  options.timeout = kLimit;
  options.stream = static_cast<cudaStream_t>(backend->stream());
  KDT_ASSIGN_OR_RETURN(void* const x, backend->Allocate(kLargest));
  const absl::Time start = absl::Now();
  KDT_ASSIGN_OR_RETURN(const auto collective, CudaCollective::Make(options));
  const double join_ms = absl::ToDoubleMilliseconds(absl::Now() - start);
  collective->SetDeadline(absl::Now() + kLimit);
  std::vector<ReduceTimes> times;
  for (size_t bytes = kSmallest; bytes <= kLargest; bytes *= 2) {
    ReduceTimes one;
    one.bytes = bytes;
    for (int m = 0; m < kReduceMethods; ++m) {
      const auto method = static_cast<ReduceMethod>(m);
      if (!collective->Has(method)) continue;
      KDT_ASSIGN_OR_RETURN(one.micros[m], MeasureReduce(*collective, method, x, bytes, kCalls, kReplays));
    }
    times.push_back(one);
  }
  std::vector<NormTimes> norms;
  for (const int64_t rows : {1, 4, 8, 16, 32, 64}) {
    KDT_ASSIGN_OR_RETURN(const NormTimes norm, MeasureNorm(*collective, *backend, x, rows));
    norms.push_back(norm);
  }
  if (rank == 0) {
    std::printf("%d ranks, devices %s, %s, joined in %.0f ms\nchosen: %s\n%s\n", ranks,
                absl::GetFlag(FLAGS_devices).c_str(), collective->name().c_str(), join_ms,
                collective->choice().ToString().c_str(), ReduceTimesTable(times).c_str());
    std::printf("with the norm behind it, rows of %d: two kernels, one (us)\n", static_cast<int>(kHidden));
    for (const NormTimes& norm : norms) {
      std::printf("%10d%12.2f%12.2f\n", static_cast<int>(norm.rows), norm.apart_us, norm.together_us);
    }
    if (const std::string file = absl::GetFlag(FLAGS_json); !file.empty()) {
      std::ofstream(file) << Json(*collective, times, norms, join_ms);
    }
  }
  // Nobody leaves while others are still at it.
  return collective->exchange().Agree(absl::OkStatus());
}

int RunAndReport(const std::string& id, int rank, int ranks) {
  const absl::Status named = InitLogging(absl::StrCat("rank ", rank), "info");
  const absl::Status status = named.ok() ? RunRank(id, rank, ranks) : named;
  if (status.ok()) return 0;
  std::fprintf(stderr, "rank %d: %s\n", rank, std::string(status.message()).c_str());
  return 1;
}

}  // namespace
}  // namespace kdt

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  const int ranks = absl::GetFlag(FLAGS_ranks);
  const std::string id = "cuda-bench-" + std::to_string(getpid());
  for (int rank = 1; rank < ranks; ++rank) {
    if (fork() == 0) _exit(kdt::RunAndReport(id, rank, ranks));
  }
  int failed = kdt::RunAndReport(id, 0, ranks);
  for (int status = 0; wait(&status) > 0;) failed |= status;
  return failed == 0 ? 0 : 1;
}
