// Ranks as processes that are forked before CUDA is touched: the test's own process never does.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kdt/kernels/backend.h"
#include "worker/collective/cuda/cuda_collective.h"

namespace kdt {

// Where the ranks of a test can run: each on a GPU of its own when there are enough, else all on GPU 0 under
// an MPS daemon that this starts for the program's life. Not at all: `reason` says why.
enum class Gpus {
  kShared,   // all on GPU 0
  kOwn,      // rank r on GPU r
  kOwnOnly,  // and no other GPU is visible to it
};
struct Placement {
  bool possible = false;
  Gpus gpus = Gpus::kShared;
  std::string reason;
};
Placement PlacementFor(int ranks);

struct RankSetup {
  int rank;
  int size;
  int device;                     // that the process is bound to
  CudaCollectiveOptions options;  // with a stream of the rank's device
};

// Runs body in `ranks` processes; it returns what is to be told: "" when all is well. A process that is
// killed tells "killed". None runs longer than a minute.
std::vector<std::string> RunRanks(int ranks, Gpus gpus, CollectiveKind kind,
                                  const std::function<std::string(const RankSetup&)>& body);

// Checks that `body` finds all well in each of `ranks` processes. Where the machine cannot do it, says so.
void CheckRankProcesses(int ranks, const std::function<absl::Status(const RankSetup&)>& body);

// The same with ranks that have formed a group.
void CheckRanks(int ranks, const std::function<absl::Status(CudaCollective&)>& test);

// And with ranks that have a backend each, on whose stream their group works.
void CheckBackedRanks(int ranks, int64_t workspace_bytes,
                      const std::function<absl::Status(kernels::Backend&, CudaCollective&)>& test);

}  // namespace kdt
