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
#include "worker/engine/step_plan.h"
#include "worker/engine/target_forward.h"
#include "worker/kv_pool/kv_pool.h"
#include "worker/model/target_weights.h"
#include "worker/sampling/sampler.h"

namespace kdt {

class EngineImpl final : public Engine {
 public:
  static absl::StatusOr<std::unique_ptr<Engine>> Load(const EngineOptions& options, kernels::Backend* backend,
                                                      const LoadProgress& progress);

  void StartEpoch(Collective* collective) override;
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
  absl::Status Sample(std::span<const PlannedSequence> sequences);
  absl::Status Walk(std::span<const PlannedSequence> sequences);
  void Decide(std::span<const PlannedSequence> sequences);
  absl::Status Commit(std::span<const PlannedSequence> sequences);
  absl::Status Draft(std::span<const PlannedSequence> sequences);
  absl::Status Move(const std::vector<SlotMove>& moves);
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
  std::unique_ptr<Sampler> sampler_;
  std::unique_ptr<Drafter> drafter_;  // null: none
  std::unique_ptr<DraftStep> draft_step_;

  Collective* collective_ = nullptr;  // null: in no epoch
  uint64_t last_step_ = 0;
  uint64_t digest_ = 0;
  std::unordered_map<SequenceId, SequenceSampling> sampling_;

  // Of the step that is running.
  StepBatch batch_;
  StagedBlock walk_block_;
  Staged<int32_t> walk_row_begin_, walk_tokens_, walk_parents_, walk_targets_, walk_path_length_, walk_path_,
      walk_next_root_;
  StagedBlock move_block_;
  Staged<int32_t> move_from_, move_to_;
  kernels::Tensor logits_;                   // of the rows that need them
  std::vector<std::vector<int32_t>> paths_;  // tokens up to each drawn row, where a penalty needs them
  std::vector<SampleRow> sample_rows_;
  std::vector<SampledRow> sampled_;
  std::vector<int32_t> tree_path_, tree_path_length_;
  std::vector<Outcome> outcomes_;
  std::vector<DraftCandidates> drafts_;
  PhaseTimes times_;
};

}  // namespace kdt
