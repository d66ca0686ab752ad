// Loads one rank's shard of a checkpoint as the worker does, with different numbers of reading threads. The
// files come from the page cache unless --cold drops them first.
//
//   load_bench --model DIR [--tp 8] [--rank 0] [--backend cuda] [--threads 1,2,4,8] [--cold]
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/flags.h"
#include "common/status.h"
#include "worker/backend_factory.h"
#include "worker/engine/engine.h"

ABSL_FLAG(std::string, model, "", "checkpoint folder");
ABSL_FLAG(int, tp, 1, "tensor-parallel size");
ABSL_FLAG(int, rank, 0, "this rank");
ABSL_FLAG(std::string, backend, "cpu", "cpu or cuda");
ABSL_FLAG(std::vector<std::string>, threads, (std::vector<std::string>{"1", "2", "4", "8"}),
          "reading threads");
ABSL_FLAG(bool, cold, false, "drop the files from the page cache before every load");

namespace kdt {
namespace {

absl::Status DropFiles(const std::string& folder) {
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    const int file = open(entry.path().c_str(), O_RDONLY);
    if (file < 0) return absl::NotFoundError(absl::StrCat("cannot open ", entry.path().string()));
    const int error = fdatasync(file) != 0 ? errno : posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    close(file);
    if (error != 0) return absl::InternalError(absl::StrCat("cannot drop ", entry.path().string()));
  }
  return absl::OkStatus();
}

absl::Status Run() {
  KDT_ASSIGN_OR_RETURN(const auto backend, MakeBackend(absl::GetFlag(FLAGS_backend), {}));
  for (const std::string& text : absl::GetFlag(FLAGS_threads)) {
    EngineOptions options;
    options.model_dir = absl::GetFlag(FLAGS_model);
    options.tp = absl::GetFlag(FLAGS_tp);
    options.rank = absl::GetFlag(FLAGS_rank);
    options.kv_slots = 1024;
    options.max_rows = 16;
    if (!absl::SimpleAtoi(text, &options.load_threads)) {
      return absl::InvalidArgumentError("--threads: not numbers");
    }
    if (absl::GetFlag(FLAGS_cold)) KDT_RETURN_IF_ERROR(DropFiles(options.model_dir));
    // From the first byte copied to the last, and with everything before (checks, memory).
    const auto start = std::chrono::steady_clock::now();
    auto first = start, last = start;
    uint64_t first_bytes = 0, bytes = 0;
    KDT_ASSIGN_OR_RETURN(const auto engine,
                         Engine::Load(options, backend.get(), [&](uint64_t loaded, uint64_t total) {
                           last = std::chrono::steady_clock::now();
                           bytes = total;
                           if (first != start) return;
                           first = last;
                           first_bytes = loaded;
                         }));
    const std::chrono::duration<double> all = std::chrono::steady_clock::now() - start, copy = last - first;
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    std::printf(
        "threads %2d: %.2f GB in %.2f s, copying at %.2f GB/s; most memory of the process so far %.2f GB\n",
        options.load_threads, static_cast<double>(bytes) * 1e-9, all.count(),
        static_cast<double>(bytes - first_bytes) * 1e-9 / copy.count(),
        static_cast<double>(usage.ru_maxrss) * 1024e-9);
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace kdt

int main(int argc, char** argv) {
  kdt::ParseFlags(argc, argv, "load_bench --model DIR [--backend cuda] [--threads LIST]");
  const absl::Status status = kdt::Run();
  if (!status.ok()) std::fprintf(stderr, "load_bench: %s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}
