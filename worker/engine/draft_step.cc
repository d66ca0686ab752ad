#include "worker/engine/draft_step.h"

#include <algorithm>

#include "common/status.h"

namespace kdt {

absl::StatusOr<std::unique_ptr<DraftStep>> DraftStep::Create(kernels::Backend* backend, Drafter* drafter,
                                                             Shard shard, int64_t vocab_size,
                                                             int64_t max_rows, int64_t max_sequences,
                                                             int64_t table_stride, int64_t window,
                                                             EngineObserver* observer) {
  auto step = std::unique_ptr<DraftStep>(new DraftStep);
  step->backend_ = backend;
  step->drafter_ = drafter;
  step->max_sequences_ = std::min(drafter->max_sequences(), max_sequences);
  step->window_ = window;
  step->observer_ = observer;
  KDT_ASSIGN_OR_RETURN(step->top_k_, DraftTopK::Create(backend, shard, vocab_size, max_rows));
  KDT_RETURN_IF_ERROR(step->tables_.Allocate(*backend, step->max_sequences_, table_stride));
  for (auto* array : {&step->kept_rows_, &step->kept_positions_, &step->kept_slots_}) {
    *array = step->context_.Reserve<int32_t>(max_rows);
  }
  step->table_index_ = step->context_.Reserve<int64_t>(max_rows);
  const int64_t block = drafter->config().block_size;
  for (auto* array : {&step->tokens_, &step->positions_, &step->mask_rows_}) {
    *array = step->blocks_.Reserve<int32_t>(step->max_sequences_ * block);
  }
  for (auto* array : {&step->context_length_, &step->window_begin_}) {
    *array = step->blocks_.Reserve<int32_t>(step->max_sequences_);
  }
  KDT_RETURN_IF_ERROR(step->context_.Allocate(*backend));
  KDT_RETURN_IF_ERROR(step->blocks_.Allocate(*backend));
  const int64_t masks = block - 1;
  for (int64_t i = 0; i < step->max_sequences_ * masks; ++i) {
    step->blocks_.host(step->mask_rows_)[i] = static_cast<int32_t>(i / masks * block + 1 + i % masks);
  }
  return step;
}

void DraftStep::FillKept(std::span<const KeptRow> kept, int64_t shape_rows) {
  for (int64_t i = 0; i < shape_rows; ++i) {
    const KeptRow row = i < static_cast<int64_t>(kept.size()) ? kept[i] : KeptRow{0, 0, -1, -1};
    context_.host(kept_rows_)[i] = row.row;
    context_.host(kept_positions_)[i] = row.position;
    context_.host(kept_slots_)[i] = row.slot;
    context_.host(table_index_)[i] = row.request < 0 ? -1 : tables_.Index(row.request, row.position);
  }
}

absl::Status DraftStep::KeptOps(int64_t shape_rows, Collective& collective) {
  KDT_RETURN_IF_ERROR(context_.Upload());
  KDT_RETURN_IF_ERROR(backend_->TableWrite(
      {context_.device(table_index_), context_.device(kept_slots_), shape_rows, tables_.data()}));
  return drafter_->AppendContext({shape_rows, context_.device(kept_rows_), context_.device(kept_positions_),
                                  context_.device(kept_slots_)},
                                 collective);
}

absl::Status DraftStep::FillDraft(std::span<const DraftRequest> requests, const KvPool& pool,
                                  int64_t shape_sequences, bool first) {
  const DrafterConfig& config = drafter_->config();
  const int64_t block = config.block_size;
  for (int64_t s = 0; s < shape_sequences; ++s) {
    DraftRequest request;
    int64_t committed = 0;
    if (s < static_cast<int64_t>(requests.size())) {
      request = requests[s];
      committed = pool.Committed(request.id);
      const auto table = pool.Table(request.id);
      KDT_RETURN_IF_ERROR(tables_.Set(s, request.id, {table.data(), static_cast<size_t>(committed)},
                                      first ? request.start : committed));
    }
    blocks_.host(context_length_)[s] = static_cast<int32_t>(committed);
    blocks_.host(window_begin_)[s] =
        static_cast<int32_t>(window_ > 0 ? std::max<int64_t>(0, committed - window_) : 0);
    for (int64_t i = 0; i < block; ++i) {
      blocks_.host(tokens_)[s * block + i] =
          i == 0 ? request.root : static_cast<int32_t>(config.mask_token_id);
      blocks_.host(positions_)[s * block + i] = static_cast<int32_t>(committed + i);
    }
  }
  return absl::OkStatus();
}

absl::Status DraftStep::DraftOps(int64_t shape_sequences, int64_t top_k, Collective& collective) {
  KDT_RETURN_IF_ERROR(blocks_.Upload());
  KDT_ASSIGN_OR_RETURN(const kernels::Tensor logits,
                       drafter_->Draft({shape_sequences, blocks_.device(tokens_), blocks_.device(positions_),
                                        blocks_.device(context_length_), blocks_.device(window_begin_),
                                        tables_.data(), tables_.stride(), blocks_.device(mask_rows_)},
                                       collective));
  if (observer_ != nullptr) observer_->OnDraftLogits(logits);
  return top_k_->Queue(logits, top_k, collective);
}

void DraftStep::Merge(std::span<const DraftRequest> requests, int64_t shape_sequences, int64_t top_k,
                      std::vector<DraftCandidates>* out) const {
  const int64_t masks = drafter_->config().block_size - 1;
  for (size_t s = 0; s < requests.size(); ++s) {
    const auto begin = static_cast<int64_t>(s) * masks;
    out->push_back(top_k_->Merge(shape_sequences * masks, top_k, begin, begin + masks, requests[s].top_k));
  }
}

}  // namespace kdt
