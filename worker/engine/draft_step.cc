#include "worker/engine/draft_step.h"

#include <algorithm>

#include "common/status.h"

namespace kdt {

absl::StatusOr<std::unique_ptr<DraftStep>> DraftStep::Create(kernels::Backend* backend, Drafter* drafter,
                                                             Shard shard, int64_t vocab_size,
                                                             int64_t max_rows, int64_t table_stride,
                                                             int64_t window, EngineObserver* observer) {
  auto step = std::unique_ptr<DraftStep>(new DraftStep);
  step->drafter_ = drafter;
  step->window_ = window;
  step->observer_ = observer;
  KDT_ASSIGN_OR_RETURN(step->top_k_, DraftTopK::Create(backend, shard, vocab_size, max_rows));
  KDT_RETURN_IF_ERROR(step->tables_.Allocate(*backend, drafter->max_sequences(), table_stride));
  for (auto* array : {&step->kept_rows_, &step->kept_positions_, &step->kept_slots_, &step->kept_iota_}) {
    *array = step->context_.Reserve<int32_t>(max_rows);
  }
  for (auto* array : {&step->tokens_, &step->positions_, &step->mask_rows_, &step->iota_,
                      &step->context_length_, &step->window_begin_}) {
    *array = step->blocks_.Reserve<int32_t>(max_rows);
  }
  KDT_RETURN_IF_ERROR(step->context_.Allocate(*backend));
  KDT_RETURN_IF_ERROR(step->blocks_.Allocate(*backend));
  for (int64_t i = 0; i < max_rows; ++i) {
    step->context_.host(step->kept_iota_)[i] = static_cast<int32_t>(i);
    step->blocks_.host(step->iota_)[i] = static_cast<int32_t>(i);
  }
  return step;
}

absl::Status DraftStep::Append(std::span<const KeptRow> kept, bool all, Collective& collective) {
  if (kept.empty()) return absl::OkStatus();
  for (size_t i = 0; i < kept.size(); ++i) {
    context_.host(kept_rows_)[i] = kept[i].row;
    context_.host(kept_positions_)[i] = kept[i].position;
    context_.host(kept_slots_)[i] = kept[i].slot;
  }
  KDT_RETURN_IF_ERROR(context_.Upload());
  return drafter_->AppendContext(
      {static_cast<int64_t>(kept.size()), context_.device(kept_rows_), context_.device(kept_iota_), all,
       context_.device(kept_positions_), context_.device(kept_slots_)},
      collective);
}

absl::Status DraftStep::Draft(std::span<const DraftRequest> requests, const KvPool& pool,
                              Collective& collective, std::vector<DraftCandidates>* out) {
  out->clear();
  const size_t most = drafter_->max_sequences();
  for (size_t begin = 0; begin < requests.size(); begin += most) {
    KDT_RETURN_IF_ERROR(
        DraftSome(requests.subspan(begin, std::min(most, requests.size() - begin)), pool, collective, out));
  }
  return absl::OkStatus();
}

absl::Status DraftStep::DraftSome(std::span<const DraftRequest> requests, const KvPool& pool,
                                  Collective& collective, std::vector<DraftCandidates>* out) {
  const DrafterConfig& config = drafter_->config();
  const int64_t block = config.block_size;
  const int64_t masks = block - 1;
  int64_t k = 0;
  for (size_t s = 0; s < requests.size(); ++s) {
    const DraftRequest& request = requests[s];
    const int64_t committed = pool.Committed(request.id);
    const auto table = pool.Table(request.id);
    KDT_RETURN_IF_ERROR(tables_.Set(s, {table.data(), static_cast<size_t>(committed)}));
    blocks_.host(context_length_)[s] = static_cast<int32_t>(committed);
    blocks_.host(window_begin_)[s] =
        static_cast<int32_t>(window_ > 0 ? std::max<int64_t>(0, committed - window_) : 0);
    for (int64_t i = 0; i < block; ++i) {
      const int64_t row = static_cast<int64_t>(s) * block + i;
      blocks_.host(tokens_)[row] = i == 0 ? request.root : static_cast<int32_t>(config.mask_token_id);
      blocks_.host(positions_)[row] = static_cast<int32_t>(committed + i);
      if (i > 0)
        blocks_.host(mask_rows_)[static_cast<int64_t>(s) * masks + i - 1] = static_cast<int32_t>(row);
    }
    k = std::max(k, request.top_k);
  }
  KDT_RETURN_IF_ERROR(blocks_.Upload());
  KDT_ASSIGN_OR_RETURN(const kernels::Tensor logits,
                       drafter_->Draft({static_cast<int64_t>(requests.size()), blocks_.device(tokens_),
                                        blocks_.device(positions_), blocks_.device(context_length_),
                                        blocks_.device(window_begin_), tables_.data(), tables_.stride(),
                                        blocks_.device(mask_rows_), blocks_.device(iota_)},
                                       collective));
  if (observer_ != nullptr) observer_->OnDraftLogits(logits);
  KDT_RETURN_IF_ERROR(top_k_->Run(logits, k, collective, &merged_));

  for (size_t s = 0; s < requests.size(); ++s) {
    DraftCandidates mine;
    mine.k = requests[s].top_k;
    for (int64_t row = static_cast<int64_t>(s) * masks; row < static_cast<int64_t>(s + 1) * masks; ++row) {
      mine.bad.push_back(merged_.bad[row]);
      mine.ids.insert(mine.ids.end(), merged_.ids.begin() + row * k, merged_.ids.begin() + row * k + mine.k);
      mine.log_probs.insert(mine.log_probs.end(), merged_.log_probs.begin() + row * k,
                            merged_.log_probs.begin() + row * k + mine.k);
    }
    out->push_back(std::move(mine));
  }
  return absl::OkStatus();
}

}  // namespace kdt
