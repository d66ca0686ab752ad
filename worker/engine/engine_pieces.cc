// The pieces of a step that can be captured, their capture at the start of an epoch, and what is counted of
// it.
#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/status.h"
#include "worker/engine/engine_impl.h"

namespace kdt {

absl::Status EngineImpl::ForwardOps(int64_t rows, int64_t sequences) {
  const auto hook = [this](int64_t layer, const kernels::Tensor& residual) -> absl::Status {
    if (options_.observer != nullptr) options_.observer->OnLayerOutput(layer, residual);
    return drafter_ == nullptr ? absl::OkStatus() : drafter_->OnLayerOutput(layer, residual);
  };
  KDT_RETURN_IF_ERROR(batch_.Upload(rows));
  return forward_->Run(batch_.Rows(rows, sequences), *collective_, hook, &times_);
}

absl::Status EngineImpl::LogitsOps(int64_t rows, bool draw) {
  KDT_RETURN_IF_ERROR(forward_->Logits(batch_.device_logit_rows(), rows));
  const kernels::Tensor logits = forward_->logits(rows);
  if (options_.observer != nullptr) options_.observer->OnLogits(logits);
  return draw ? argmax_draw_->Queue(logits, batch_.draw_keys(), *collective_) : absl::OkStatus();
}

absl::Status EngineImpl::KeptOps(int64_t rows) {
  KDT_RETURN_IF_ERROR(move_block_.Upload());
  // The drafter has no rows yet for what this step brought: it takes them in at their places.
  KDT_RETURN_IF_ERROR(backend_->KvMove({move_block_.device(move_from_), move_block_.device(move_to_), rows,
                                        kv_.Layer(0), kv_.layers(), kv_.layer_stride()}));
  return drafter_ == nullptr ? absl::OkStatus() : draft_step_->KeptOps(rows, *collective_);
}

int64_t EngineImpl::DraftShape(int64_t sequences) const {
  return std::min(graphs_->Rows(sequences), draft_step_->max_sequences());
}

int64_t EngineImpl::DraftTopKShape(std::span<const DraftRequest> requests) const {
  if (graphs_->pads()) return limits_.max_draft_top_k;
  int64_t most = 1;
  for (const DraftRequest& request : requests) most = std::max(most, request.top_k);
  return most;
}

absl::Status EngineImpl::Capture() {
  const auto start = std::chrono::steady_clock::now();
  for (const int64_t rows : graphs_->row_buckets()) {
    for (const int64_t sequences : graphs_->SequenceBuckets(rows)) {
      KDT_RETURN_IF_ERROR(graphs_->Capture(StepPiece::kForward, rows, sequences,
                                           [&] { return ForwardOps(rows, sequences); }));
    }
    KDT_RETURN_IF_ERROR(graphs_->Capture(StepPiece::kLogits, rows, 0, [&] { return LogitsOps(rows, true); }));
    KDT_RETURN_IF_ERROR(graphs_->Capture(StepPiece::kKept, rows, 0, [&] { return KeptOps(rows); }));
    if (drafter_ == nullptr || (rows > 1 && DraftShape(rows) < rows)) continue;
    KDT_RETURN_IF_ERROR(graphs_->Capture(StepPiece::kDraft, rows, 0, [&] {
      return draft_step_->DraftOps(rows, limits_.max_draft_top_k, *collective_);
    }));
  }
  if (const int64_t most = drafter_ == nullptr ? 0 : draft_step_->max_sequences(); most > 0) {
    KDT_RETURN_IF_ERROR(graphs_->Capture(StepPiece::kDraft, most, 0, [&] {
      return draft_step_->DraftOps(most, limits_.max_draft_top_k, *collective_);
    }));
  }
  capture_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  spdlog::info("captured {} graphs of {} nodes in {:.2f} s", graphs_->graphs(), graphs_->nodes(),
               capture_seconds_);
  return absl::OkStatus();
}

absl::Status EngineImpl::StartEpoch(Collective* collective) {
  collective_ = nullptr;
  backend_->Seal(false);
  // What a step that failed has left in the queue may still use what is dropped here.
  const absl::Status idle = backend_->Synchronize();
  graphs_->Clear();
  KDT_RETURN_IF_ERROR(idle);
  pool_->Clear();
  sampling_.clear();
  batch_.tables().Clear();
  if (draft_step_ != nullptr) draft_step_->tables().Clear();
  last_step_ = 0;
  digest_ = 0;
  if (collective == nullptr) return absl::OkStatus();
  collective_ = collective;
  if (graphs_->captures()) {
    const absl::Status captured = Capture();
    if (!captured.ok()) {
      graphs_->Clear();
      collective_ = nullptr;
      return captured;
    }
  }
  backend_->Seal(options_.strict);
  return absl::OkStatus();
}

EngineStats EngineImpl::stats() const {
  EngineStats stats;
  stats.capture_seconds = capture_seconds_;
  stats.graphs = graphs_->graphs();
  stats.graph_nodes = graphs_->nodes();
  for (const auto& [rows, replays] : graphs_->replays()) {
    stats.replays.push_back({rows, static_cast<uint64_t>(replays)});
  }
  if (const kernels::Graph* forward = graphs_->last_forward(); forward != nullptr) {
    stats.kernel_uses = forward->kernel_uses();
  }
  stats.attention = attention_->errors();
  stats.general_draws = general_draws_;
  stats.device = backend_->stats();
  return stats;
}

}  // namespace kdt
