// The engine's parts and the order in which a step uses them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/drafter_config.h"
#include "common/model_config.h"
#include "worker/draft/drafter.h"
#include "worker/draft/drafter_weights.h"
#include "worker/engine/draft_step.h"
#include "worker/engine/engine.h"
#include "worker/engine/kv_storage.h"
#include "worker/engine/phase_timer.h"
#include "worker/engine/step_batch.h"
#include "worker/engine/step_graphs.h"
#include "worker/engine/step_plan.h"
#include "worker/engine/target_forward.h"
#include "worker/kv_pool/kv_pool.h"
#include "worker/model/target_weights.h"
#include "worker/sampling/argmax_draw.h"
#include "worker/sampling/sampler.h"

namespace kdt {

class EngineImpl final : public Engine {
 public:
  static absl::StatusOr<std::unique_ptr<Engine>> Load(const EngineOptions& options, kernels::Backend* backend,
                                                      const LoadProgress& progress);

  absl::Status StartEpoch(Collective* collective) override;
  absl::Status Step(const v1::StepRequest& request, v1::StepResponse* response) override;
  absl::Status AssumeSequence(uint64_t id, int64_t context) override;
  EngineStats stats() const override;
  void Describe(v1::DescribeResponse* response) const override;

 private:
  // What a step decided for one of its sequences.
  struct Outcome {
    std::string error;           // not empty: nothing of it was kept
    std::vector<int32_t> kept;   // rows kept, rising; the path of a tree, root first
    std::vector<int32_t> drawn;  // tokens: accepted ones, then the new root
    int64_t draft = -1;          // index among the step's draft results
  };

  EngineImpl(const EngineOptions& options, kernels::Backend* backend)
      : options_(options), backend_(backend) {}
  absl::Status CheckOptions();
  absl::Status LoadWeights(const LoadProgress& progress);
  absl::Status CreateParts();
  int64_t SlotBytes() const;  // of one slot in all pools

  absl::Status ApplyOps(const std::vector<PlannedOp>& ops);
  absl::Status BeginRows(std::span<const PlannedSequence> sequences);
  absl::Status Forward(std::span<const PlannedSequence> sequences);
  bool CountsExperts() const;  // in the step that runs
  void FillSampleRows(std::span<const PlannedSequence> sequences);
  absl::Status Sample();
  void Walk(std::span<const PlannedSequence> sequences);
  void Decide(std::span<const PlannedSequence> sequences);
  absl::Status Commit(std::span<const PlannedSequence> sequences);
  absl::Status Draft();
  void MergeDrafts();
  absl::Status Relocate();
  void EndStep();
  void ForgetTables();

  // The pieces (step_graphs.h), of shapes: they only queue work.
  absl::Status ForwardOps(int64_t rows, int64_t sequences);
  absl::Status LogitsOps(int64_t rows, bool draw);
  absl::Status KeptOps(int64_t rows);
  absl::Status Capture();
  int64_t DraftShape(int64_t sequences) const;
  int64_t DraftTopKShape(std::span<const DraftRequest> requests) const;

  void Respond(std::span<const PlannedSequence> sequences, v1::StepResponse* response);
  void FillResult(const PlannedSequence& sequence, size_t index, v1::SequenceResult* result) const;
  void UpdateDigest(std::span<const PlannedSequence> sequences);

  EngineOptions options_;
  kernels::Backend* backend_;
  Shard shard_;
  ModelConfig config_;
  DrafterConfig drafter_config_;
  std::string checkpoint_digest_;
  TargetWeights weights_;
  DrafterWeights drafter_weights_;
  StepLimits limits_;
  int64_t kv_slots_ = 0;

  std::unique_ptr<KvPool> pool_;
  KvStorage kv_;
  KvStorage drafter_kv_;
  std::unique_ptr<AttentionCheck> attention_;
  std::unique_ptr<TargetForward> forward_;
  std::unique_ptr<ArgmaxDraw> argmax_draw_;
  std::unique_ptr<Sampler> sampler_;
  std::unique_ptr<Drafter> drafter_;  // null: none
  std::unique_ptr<DraftStep> draft_step_;

  std::unique_ptr<StepGraphs> graphs_;
  double capture_seconds_ = 0;
  int64_t general_draws_ = 0;

  Collective* collective_ = nullptr;  // null: in no epoch
  uint64_t last_step_ = 0;
  uint64_t digest_ = 0;
  std::unordered_map<SequenceId, SequenceSampling> sampling_;

  // Of the step that is running.
  StepBatch batch_;
  struct Shape {
    int64_t rows = 0, sequences = 0, logit_rows = 0;
  };
  Shape shape_;
  StagedBlock relocation_block_;
  Staged<int32_t> relocation_from_, relocation_to_;
  StagedBlock move_block_;
  Staged<int32_t> move_from_, move_to_;
  std::vector<std::vector<int32_t>> paths_;  // tokens up to each drawn row, where a penalty needs them
  std::vector<SampleRow> sample_rows_;
  bool draws_by_argmax_ = false;  // all of them
  bool device_idle_ = false;      // nothing has been queued since the host waited for the device
  std::vector<SampledRow> sampled_;
  std::vector<Outcome> outcomes_;
  std::vector<SlotMove> moves_;
  std::vector<KeptRow> kept_;
  std::vector<DraftRequest> requests_;
  // The draft pass whose results are not merged yet.
  struct Pending {
    std::span<const DraftRequest> requests;
    int64_t sequences = 0, top_k = 0;
  };
  Pending pending_;
  std::vector<DraftCandidates> drafts_;
  PhaseTimes times_;
};

}  // namespace kdt
