// Time of one collective between processes of one host, as a rank sees it: median and 99th percentile of rank
// 0 over many calls that come back to back. collective_bench [RANKS] (default 8).
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "common/clock.h"
#include "common/status.h"
#include "worker/collective/collective.h"

namespace kdt {
namespace {

constexpr int kWarmUp = 200, kCalls = 3000;
constexpr size_t kBufferBytes = 1 << 20;

template <typename Call>
void Measure(Collective& collective, const char* name, size_t bytes, Call call) {
  std::vector<int64_t> times;
  for (int i = 0; i < kWarmUp + kCalls; ++i) {
    const int64_t start = MonotonicNanos();
    KDT_CHECK(call().ok());
    if (i >= kWarmUp) times.push_back(MonotonicNanos() - start);
  }
  if (collective.rank() != 0) return;
  std::sort(times.begin(), times.end());
  std::printf("%-10s %8zu bytes  median %7.1f us  p99 %7.1f us\n", name, bytes, times[times.size() / 2] / 1e3,
              times[times.size() * 99 / 100] / 1e3);
}

int RunRank(const std::string& id, int rank, int size) {
  auto collective = MakeShmCollective(id, rank, size, kBufferBytes, absl::Seconds(20));
  if (!collective.ok()) {
    std::fprintf(stderr, "%s\n", std::string(collective.status().message()).c_str());
    return 1;
  }
  if (rank == 0) std::printf("%d ranks\n", size);
  for (const size_t bytes : {1024, 4096, 16384, 65536, 262144}) {
    std::vector<float> values(bytes / sizeof(float));
    const auto x =
        kernels::MakeTensor(values.data(), kernels::DType::kF32, 1, static_cast<int64_t>(values.size()));
    Measure(**collective, "all_reduce", bytes, [&] { return (*collective)->AllReduceSum(x); });
  }
  for (const size_t bytes : {1024, 16384}) {
    const std::vector<char> in(bytes);
    std::vector<char> out(bytes * static_cast<size_t>(size));
    Measure(**collective, "all_gather", bytes,
            [&] { return (*collective)->AllGather(in.data(), bytes, out.data()); });
  }
  return 0;
}

}  // namespace
}  // namespace kdt

int main(int argc, char** argv) {
  const int size = argc > 1 ? std::atoi(argv[1]) : 8;
  const std::string id = "bench-" + std::to_string(getpid());
  for (int rank = 1; rank < size; ++rank) {
    if (fork() == 0) {
      const int result = kdt::RunRank(id, rank, size);
      _exit(result);
    }
  }
  int failed = kdt::RunRank(id, 0, size);
  for (int status = 0; wait(&status) > 0;) failed |= status;
  return failed == 0 ? 0 : 1;
}
