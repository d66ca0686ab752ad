// A tensor-parallel group in one process: a thread, a backend and an engine a rank, and real shm collectives
// (on the host's memory).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kdt/kernels/backend.h"
#include "worker/collective/collective.h"
#include "worker/engine/engine.h"

namespace kdt::testing {

class EngineGroup {
 public:
  // Makes a rank's backend; null: the CPU's with one thread.
  using BackendMaker = std::function<absl::StatusOr<std::unique_ptr<kernels::Backend>>()>;

  // `options.rank` and `options.tp` are set here; `observer` (may be null) sees rank 0.
  static absl::StatusOr<std::unique_ptr<EngineGroup>> Start(EngineOptions options, int tp,
                                                            EngineObserver* observer = nullptr,
                                                            const BackendMaker& make_backend = nullptr);

  // A step on every rank. Checks that all agree on the digest; returns rank 0's response. `request.step` is
  // filled in.
  absl::StatusOr<v1::StepResponse> Step(v1::StepRequest request);
  // Drops all sequences.
  void Restart();

  kernels::Backend& backend(int rank) { return *ranks_[rank].backend; }
  Engine& engine(int rank) { return *ranks_[rank].engine; }

 private:
  struct Rank {
    std::unique_ptr<kernels::Backend> backend;
    std::unique_ptr<Engine> engine;
    std::unique_ptr<Collective> collective;
  };
  // Runs `body(rank)` on a thread a rank; the first error.
  absl::Status OnAllRanks(const std::function<absl::Status(int)>& body);

  std::vector<Rank> ranks_;
  uint64_t next_step_ = 1;
};

// Options for the reference checkpoint of tests/goldens; small pools.
EngineOptions GoldenOptions(bool with_drafter);

// The requests of one sequence's life, in the order the coordinator would send them.
v1::SamplingState GreedySampling(uint32_t prompt_length);
void AddCreate(v1::StepRequest* request, uint64_t id, const v1::SamplingState& sampling);
void AddFork(v1::StepRequest* request, uint64_t id, uint64_t parent, uint32_t length,
             const v1::SamplingState& sampling);
void AddFree(v1::StepRequest* request, uint64_t id);
v1::PrefillChunk* AddChunk(v1::StepRequest* request, uint64_t id, uint32_t start,
                           const std::vector<int32_t>& tokens);
// A new sequence with its whole prompt, drawn behind its last token.
v1::PrefillChunk* AddPrompt(v1::StepRequest* request, uint64_t id, const v1::SamplingState& sampling,
                            const std::vector<int32_t>& tokens);
// A tree whose node 0 is the root; `parents` of nodes 1 ...
v1::TreeVerify* AddTree(v1::StepRequest* request, uint64_t id, uint32_t start,
                        const std::vector<int32_t>& tokens, const std::vector<int32_t>& parents);

}  // namespace kdt::testing
