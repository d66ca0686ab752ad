// One rank's model: applies a step's sequence operations, runs the forward over all rows, samples, walks the
// trees, commits, drafts. Single-threaded: one step at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kdt/kernels/backend.h"
#include "kdt/v1/worker.pb.h"
#include "worker/collective/collective.h"
#include "worker/engine/attention_check.h"
#include "worker/engine/observer.h"
#include "worker/engine/step_graphs.h"
#include "worker/model/load_progress.h"
#include "worker/model/shard.h"

namespace kdt {

struct EngineOptions {
  std::string model_dir;
  std::string drafter_dir;  // empty: no drafter
  int rank = 0;
  int tp =
      1;  // must divide heads, experts' width / 32, vocabulary, dense width: INVALID_ARGUMENT names which
  kernels::DType kv_dtype = kernels::DType::kF32;
  int64_t kv_slots = 0;                 // usable slots; 0: derived from kv_bytes
  int64_t kv_bytes = int64_t{1} << 30;  // memory for target and drafter pools
  int64_t max_rows = 1024;              // rows a step
  int64_t max_sequences = 256;
  int64_t max_context = 0;       // 0: the model's
  int64_t max_tree_nodes = 256;  // root included
  int64_t draft_window = 0;      // context positions a draft block sees, counted from its end; 0: all
  float draft_rope_factor = 0;   // factor on cos and sin in the drafter; 0: what its config says
  // Most threads that read a checkpoint: enough to keep a device's link busy from the page cache, and more
  // than most disks want.
  int load_threads = 8;
  MoeSharding moe_sharding = MoeSharding::kTensor;
  // The folders need to hold nothing but config.json: weights and KV rows are random. For benchmarks.
  bool random_weights = false;
  AttentionMode attention = AttentionMode::kFast;
  int64_t validate_every = 64;  // kValidate: every so many steps
  StepMode step_mode = StepMode::kAuto;
  // After StartEpoch the backend is sealed (Backend::Seal): a step that allocates, or copies pageable memory
  // outside the general sampler, fails with the call's name.
  bool strict = false;
  EngineObserver* observer = nullptr;  // for tests; outlives the engine. No graphs with one
};

// What an engine did and found since it was loaded.
struct EngineStats {
  struct GraphReplays {
    int64_t rows = 0;  // the bucket
    uint64_t replays = 0;
  };
  std::vector<GraphReplays>
      replays;                 // of the target's graphs, by rising rows; empty where nothing is captured
  double capture_seconds = 0;  // to capture all graphs, the last time
  std::vector<kernels::KernelUse> kernel_uses;  // of the target's graph that ran last
  AttentionErrors attention;
  int64_t graphs = 0;  // of all pieces
  int64_t graph_nodes = 0;
  int64_t general_draws = 0;  // steps whose sampling went through the host
  kernels::BackendStats device;
};

class Engine {
 public:
  virtual ~Engine() = default;

  // Reads this rank's slices of the checkpoint. Errors name file, tensor or config field.
  static absl::StatusOr<std::unique_ptr<Engine>> Load(const EngineOptions& options, kernels::Backend* backend,
                                                      const LoadProgress& progress);

  // Drops all sequences and uses `collective` from now on (owned by the caller, alive until the next call).
  // Where the backend captures graphs they are made here; an error names the op that would not be captured. A
  // step of more rows than the largest of them (max_rows) is refused, as everywhere.
  virtual absl::Status StartEpoch(Collective* collective) = 0;

  // Runs one step. The request's every field is checked before anything changes. An error Status means that
  // the step failed as a whole (a bad request, a dead collective, a device fault) and the epoch is over. On
  // rank 0 `response.results` is filled; digest, timings and pool always.
  virtual absl::Status Step(const v1::StepRequest& request, v1::StepResponse* response) = 0;

  // A sequence of `context` tokens whose KV rows are whatever lies in the pool, drawn at temperature 1. For
  // benchmarks: FAILED_PRECONDITION without random_weights.
  virtual absl::Status AssumeSequence(uint64_t /*id*/, int64_t /*context*/) {
    return absl::FailedPreconditionError("this engine has no random weights");
  }

  // On the thread that runs the steps.
  virtual EngineStats stats() const { return {}; }

  // Identity and sizes: every field of DescribeResponse the engine knows.
  virtual void Describe(v1::DescribeResponse* response) const = 0;
};

}  // namespace kdt
