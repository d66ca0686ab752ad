// Loading: configs, weights, and the memory of everything a step uses.
#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kdt/v1/worker.pb.h"
#include "worker/engine/engine_impl.h"
#include "worker/model/random_source.h"
#include "worker/model/weight_source.h"

namespace kdt {
namespace {

constexpr int64_t kMaxSlots = (int64_t{1} << 31) - 2;  // slot ids are int32, slot 0 is padding

constexpr float kMaxRopeFactor = 16;

absl::Status CheckRange(const char* name, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, " is ", value, ", must be ", min, " .. ", max));
}

absl::StatusOr<std::unique_ptr<WeightSource>> OpenSource(const EngineOptions& options,
                                                         const std::string& folder) {
  if (options.random_weights) return MakeRandomSource();
  return OpenCheckpointSource(folder);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Load(const EngineOptions& options, kernels::Backend* backend,
                                                     const LoadProgress& progress) {
  return EngineImpl::Load(options, backend, progress);
}

absl::StatusOr<std::unique_ptr<Engine>> EngineImpl::Load(const EngineOptions& options,
                                                         kernels::Backend* backend,
                                                         const LoadProgress& progress) {
  auto engine = std::unique_ptr<EngineImpl>(new EngineImpl(options, backend));
  KDT_RETURN_IF_ERROR(engine->CheckOptions());
  KDT_RETURN_IF_ERROR(engine->LoadWeights(progress));
  KDT_RETURN_IF_ERROR(engine->CreateParts());
  return engine;
}

absl::Status EngineImpl::CheckOptions() {
  KDT_RETURN_IF_ERROR(CheckRange("tp", options_.tp, 1, 1024));
  KDT_RETURN_IF_ERROR(CheckRange("rank", options_.rank, 0, options_.tp - 1));
  KDT_RETURN_IF_ERROR(CheckRange("load_threads", options_.load_threads, 1, 1024));
  KDT_RETURN_IF_ERROR(CheckRange("kv_slots", options_.kv_slots, 0, kMaxSlots));
  KDT_RETURN_IF_ERROR(CheckRange("max_rows", options_.max_rows, 1, 1 << 20));
  KDT_RETURN_IF_ERROR(CheckRange("max_sequences", options_.max_sequences, 1, 1 << 16));
  KDT_RETURN_IF_ERROR(CheckRange("max_tree_nodes", options_.max_tree_nodes, 1, kernels::kMaxTreeRows));
  KDT_RETURN_IF_ERROR(CheckRange("draft_window", options_.draft_window, 0, kMaxSlots));
  if (!(options_.draft_rope_factor >= 0 && options_.draft_rope_factor <= kMaxRopeFactor)) {
    return absl::InvalidArgumentError(
        absl::StrCat("draft_rope_factor is ", options_.draft_rope_factor, ", must be 0 .. ", kMaxRopeFactor));
  }
  if (options_.kv_dtype == kernels::DType::kF32 && backend_->activation_dtype() != kernels::DType::kF32) {
    return absl::InvalidArgumentError(
        absl::StrCat("kv_dtype is f32, but the ", backend_->name(), " backend keeps KV rows in bf16"));
  }
  shard_ = {options_.rank, options_.tp};
  return absl::OkStatus();
}

absl::Status EngineImpl::LoadWeights(const LoadProgress& progress) {
  KDT_ASSIGN_OR_RETURN(config_, ModelConfig::Load(options_.model_dir));
  KDT_RETURN_IF_ERROR(
      config_.CheckTensorParallel(options_.tp, options_.moe_sharding == MoeSharding::kExpert));
  if (options_.max_context == 0) options_.max_context = config_.max_position_embeddings;
  KDT_RETURN_IF_ERROR(CheckRange("max_context", options_.max_context, 1, config_.max_position_embeddings));
  KDT_ASSIGN_OR_RETURN(const std::unique_ptr<WeightSource> target, OpenSource(options_, options_.model_dir));
  checkpoint_digest_ = target->Digest();

  const bool drafts = !options_.drafter_dir.empty();
  std::unique_ptr<WeightSource> drafter;
  if (drafts) {
    KDT_ASSIGN_OR_RETURN(drafter_config_, DrafterConfig::Load(options_.drafter_dir));
    KDT_RETURN_IF_ERROR(CheckFits(drafter_config_, config_));
    KDT_RETURN_IF_ERROR(drafter_config_.CheckTensorParallel(options_.tp));
    if (drafter_config_.hidden_size % options_.tp != 0) {
      return absl::InvalidArgumentError(absl::StrCat("the drafter's hidden_size ",
                                                     drafter_config_.hidden_size, " cannot be split over ",
                                                     options_.tp, " ranks"));
    }
    KDT_ASSIGN_OR_RETURN(drafter, OpenSource(options_, options_.drafter_dir));
    checkpoint_digest_ = absl::StrCat(checkpoint_digest_, "+", drafter->Digest());
  }

  // First everything is checked and counted, then everything is copied.
  uint64_t total = 0;
  for (const auto mode : {WeightLoader::Mode::kPlan, WeightLoader::Mode::kCopy}) {
    WeightLoader loader(mode, backend_, shard_, progress, total);
    loader.SetSource(target.get());
    KDT_ASSIGN_OR_RETURN(weights_, LoadTargetWeights(config_, options_.moe_sharding, loader));
    if (drafts) {
      KDT_ASSIGN_OR_RETURN(drafter_weights_, LoadDrafterWeights(drafter_config_, *drafter, loader));
    }
    KDT_RETURN_IF_ERROR(loader.Finish(options_.load_threads));
    total = loader.bytes();
  }
  return absl::OkStatus();
}

int64_t EngineImpl::SlotBytes() const {
  const int64_t element = kernels::DTypeSize(options_.kv_dtype);
  int64_t values = config_.num_hidden_layers * (config_.kv_lora_rank + config_.qk_rope_head_dim);
  if (!options_.drafter_dir.empty()) {
    values += drafter_config_.num_hidden_layers * Drafter::KvWidth(drafter_config_, shard_);
  }
  return values * element;
}

absl::Status EngineImpl::CreateParts() {
  kv_slots_ = options_.kv_slots;
  // One slot more than can be used: the padding slot.
  if (kv_slots_ == 0) kv_slots_ = std::min(options_.kv_bytes / SlotBytes() - 1, kMaxSlots);
  if (kv_slots_ < 1) {
    return absl::InvalidArgumentError(absl::StrCat("kv_bytes is ", options_.kv_bytes,
                                                   ", too little for one slot of ", SlotBytes(), " bytes"));
  }
  const bool drafts = !options_.drafter_dir.empty();
  limits_.vocab_size = config_.vocab_size;
  limits_.max_rows = options_.max_rows;
  limits_.max_tree_nodes = std::min(options_.max_tree_nodes, options_.max_rows);
  limits_.max_sequences = options_.max_sequences;
  limits_.max_context = options_.max_context;
  limits_.max_draft_top_k = drafts ? std::min<int64_t>(kernels::kMaxTopK, config_.vocab_size) : 0;
  limits_.max_logprobs = std::min<int64_t>(Sampler::kMaxTop, config_.vocab_size);

  // A tree near the end of the context has more nodes than positions.
  const int64_t longest_table = std::min(options_.max_context, kv_slots_) + limits_.max_tree_nodes;
  KDT_ASSIGN_OR_RETURN(pool_, KvPool::Create(kv_slots_, options_.max_sequences, longest_table));
  KDT_ASSIGN_OR_RETURN(kv_,
                       KvStorage::Create(*backend_, config_.num_hidden_layers, kv_slots_,
                                         config_.kv_lora_rank + config_.qk_rope_head_dim, options_.kv_dtype));
  KDT_ASSIGN_OR_RETURN(
      attention_,
      AttentionCheck::Create(backend_, options_.attention, options_.validate_every, options_.max_rows,
                             shard_.Count(config_.num_attention_heads) * config_.kv_lora_rank));
  KDT_ASSIGN_OR_RETURN(forward_,
                       TargetForward::Create(backend_, &config_, &weights_, &kv_, shard_, options_.max_rows,
                                             attention_.get(), options_.moe_sharding));
  KDT_ASSIGN_OR_RETURN(sampler_, Sampler::Create(backend_, shard_, config_.vocab_size, options_.max_rows));
  KDT_RETURN_IF_ERROR(batch_.Allocate(*backend_, limits_, longest_table));

  // A test that looks into a step sees it op by op.
  const bool looked_at = options_.observer != nullptr && options_.step_mode == StepMode::kAuto;
  graphs_ = std::make_unique<StepGraphs>(
      backend_, looked_at && backend_->can_capture() ? StepMode::kEager : options_.step_mode,
      options_.max_rows, options_.max_sequences);
  KDT_ASSIGN_OR_RETURN(argmax_draw_,
                       ArgmaxDraw::Create(backend_, shard_, config_.vocab_size, options_.max_rows));
  relocation_from_ = relocation_block_.Reserve<int32_t>(limits_.max_rows);
  relocation_to_ = relocation_block_.Reserve<int32_t>(limits_.max_rows);
  KDT_RETURN_IF_ERROR(relocation_block_.Allocate(*backend_));
  move_from_ = move_block_.Reserve<int32_t>(limits_.max_rows);
  move_to_ = move_block_.Reserve<int32_t>(limits_.max_rows);
  KDT_RETURN_IF_ERROR(move_block_.Allocate(*backend_));
  if (options_.random_weights) {
    KDT_RETURN_IF_ERROR(FillRandom(*backend_, options_.kv_dtype, kv_.buffer()));
  }
  if (!drafts) return absl::OkStatus();

  KDT_ASSIGN_OR_RETURN(drafter_kv_,
                       KvStorage::Create(*backend_, drafter_config_.num_hidden_layers, kv_slots_,
                                         Drafter::KvWidth(drafter_config_, shard_), options_.kv_dtype));
  if (options_.random_weights) {
    KDT_RETURN_IF_ERROR(FillRandom(*backend_, options_.kv_dtype, drafter_kv_.buffer()));
  }
  KDT_ASSIGN_OR_RETURN(
      drafter_, Drafter::Create(backend_, &drafter_config_, &drafter_weights_, forward_.get(), &drafter_kv_,
                                shard_, options_.max_rows, options_.draft_rope_factor));
  KDT_ASSIGN_OR_RETURN(
      draft_step_,
      DraftStep::Create(backend_, drafter_.get(), shard_, config_.vocab_size, options_.max_rows,
                        options_.max_sequences, longest_table, options_.draft_window, options_.observer));
  return absl::OkStatus();
}

absl::Status EngineImpl::AssumeSequence(uint64_t id, int64_t context) {
  if (!options_.random_weights) {
    return absl::FailedPreconditionError("only an engine with random weights assumes a context");
  }
  KDT_RETURN_IF_ERROR(pool_->CreateSequence(id, context + limits_.max_rows));
  KDT_RETURN_IF_ERROR(pool_->BeginRows(id, context));
  std::vector<int32_t> tokens(context);
  std::iota(tokens.begin(), tokens.end(), 0);
  std::vector<SlotMove> moves;
  KDT_RETURN_IF_ERROR(pool_->Commit(id, tokens, &moves));
  std::fill(tokens.begin(), tokens.end(), 0);
  SequenceSampling sampling({}, shard_.Begin(config_.vocab_size), shard_.Count(config_.vocab_size));
  sampling.Append(tokens);
  sampling_.try_emplace(id, std::move(sampling));
  return absl::OkStatus();
}

void EngineImpl::Describe(v1::DescribeResponse* response) const {
  response->set_rank(options_.rank);
  response->set_tp(options_.tp);
  response->set_backend(backend_->name());
  response->set_device(backend_->device_name());
  response->set_checkpoint_digest(checkpoint_digest_);
  response->set_kv_slots_total(kv_slots_);
  response->set_max_rows(static_cast<uint32_t>(limits_.max_rows));
  response->set_max_tree_nodes(static_cast<uint32_t>(limits_.max_tree_nodes));
  response->set_max_sequences(static_cast<uint32_t>(limits_.max_sequences));
  response->set_draft_block_size(drafter_ == nullptr ? 0 : static_cast<uint32_t>(drafter_config_.block_size));
  response->set_max_draft_top_k(static_cast<uint32_t>(limits_.max_draft_top_k));
  response->set_kv_dtype(options_.kv_dtype == kernels::DType::kF32 ? "f32" : "bf16");
  response->set_max_context(static_cast<uint32_t>(limits_.max_context));
}

}  // namespace kdt
