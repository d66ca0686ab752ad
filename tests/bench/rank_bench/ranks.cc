#include "tests/bench/rank_bench/ranks.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <new>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace kdt::bench {

absl::Status RunRanks(int ranks, const std::function<absl::Status(int, Told*)>& body) {
  void* memory = mmap(nullptr, sizeof(Told), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return absl::ResourceExhaustedError("no shared memory");
  Told* told = new (memory) Told;
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      const absl::Status status = body(rank, told);
      if (!status.ok()) std::fprintf(stderr, "rank %d: %s\n", rank, std::string(status.message()).c_str());
      std::fflush(nullptr);
      _exit(status.ok() ? 0 : 1);
    }
    if (child < 0) break;
    children.push_back(child);
  }
  absl::Status status;
  if (static_cast<int>(children.size()) < ranks) status = absl::ResourceExhaustedError("cannot fork");
  for (size_t left = children.size(); left > 0; --left) {
    if (!status.ok()) {
      for (pid_t child : children) kill(child, SIGKILL);
    }
    int exit = 0;
    const pid_t ended = wait(&exit);
    for (pid_t& child : children) {
      if (child != ended) continue;
      std::swap(child, children.back());
      children.pop_back();
      break;
    }
    if (exit != 0 && status.ok()) status = absl::InternalError("a rank failed");
  }
  munmap(memory, sizeof(Told));
  return status;
}

}  // namespace kdt::bench
