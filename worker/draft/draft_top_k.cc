#include "worker/draft/draft_top_k.h"

#include <algorithm>

#include "common/status.h"
#include "worker/sampling/truncation.h"
#include "worker/sampling/vocab_gather.h"

namespace kdt {

using kernels::Buffer;
using kernels::kMaxTopK;
using kernels::Tensor;

DraftTopK::Layout::Layout(int64_t rows, int64_t k) {
  constexpr int64_t kRowsUnit = 16;  // everything is aligned to 16 bytes
  const auto pitch = static_cast<size_t>((rows + kRowsUnit - 1) / kRowsUnit * kRowsUnit);
  sum = pitch * sizeof(float);
  bad = sum + pitch * sizeof(float);
  ids = bad + pitch;
  values = ids + pitch * k * sizeof(int32_t);
  size = values + pitch * k * sizeof(float);
}

absl::StatusOr<std::unique_ptr<DraftTopK>> DraftTopK::Create(kernels::Backend* backend, Shard shard,
                                                             int64_t vocab_size, int64_t max_rows) {
  auto top = std::unique_ptr<DraftTopK>(new DraftTopK(backend, shard, vocab_size));
  const size_t bytes = Layout(max_rows, top->LocalK(kMaxTopK)).size;
  KDT_ASSIGN_OR_RETURN(top->mine_, Buffer::Make(*backend, bytes));
  KDT_ASSIGN_OR_RETURN(top->host_, kernels::HostBuffer::Make(*backend, bytes * shard.size));
  if (shard.size == 1) return top;
  KDT_ASSIGN_OR_RETURN(top->all_, Buffer::Make(*backend, bytes * shard.size));
  return top;
}

int64_t DraftTopK::LocalK(int64_t k) const { return std::min(k, shard_.Count(vocab_size_)); }

absl::Status DraftTopK::Queue(const Tensor& logits, int64_t k, Collective& collective) {
  const int64_t local = LocalK(k);
  const Layout layout(logits.rows, local);
  char* const to = mine_.as<char>();
  KDT_RETURN_IF_ERROR(backend_->LogitsTopK(
      {logits, shard_.Begin(vocab_size_), local, reinterpret_cast<float*>(to),
       reinterpret_cast<float*>(to + layout.sum), reinterpret_cast<uint8_t*>(to + layout.bad),
       reinterpret_cast<int32_t*>(to + layout.ids), reinterpret_cast<float*>(to + layout.values)}));
  if (shard_.size == 1) return backend_->DownloadAsync(host_.data(), to, layout.size);
  KDT_RETURN_IF_ERROR(collective.AllGather(to, layout.size, all_.data()));
  return backend_->DownloadAsync(host_.data(), all_.data(), layout.size * shard_.size);
}

DraftCandidates DraftTopK::Merge(int64_t queued_rows, int64_t queued_k, int64_t begin, int64_t end,
                                 int64_t k) const {
  const int64_t local = LocalK(queued_k);
  const Layout layout(queued_rows, local);
  DraftCandidates out;
  out.k = k;
  out.ids.assign((end - begin) * k, 0);
  out.log_probs.assign((end - begin) * k, 0);
  out.bad.assign(end - begin, 0);
  std::vector<int64_t> taken(shard_.size);  // of each rank's list, which is sorted
  for (int64_t row = begin; row < end; ++row) {
    LogSum sum = kEmptyLogSum;
    uint8_t& bad = out.bad[row - begin];
    const auto part = [&](int rank, size_t offset) { return host_.data() + rank * layout.size + offset; };
    for (int rank = 0; rank < shard_.size; ++rank) {
      sum.Merge(reinterpret_cast<const float*>(part(rank, 0))[row],
                reinterpret_cast<const float*>(part(rank, layout.sum))[row]);
      bad |= part(rank, layout.bad)[row] != 0 ? 1 : 0;
    }
    if (bad != 0) continue;
    const double log_sum_exp = sum.LogSumExp();
    std::fill(taken.begin(), taken.end(), 0);
    for (int64_t j = 0; j < k; ++j) {
      Candidate best{-1, 0};
      int best_rank = 0;
      for (int rank = 0; rank < shard_.size; ++rank) {
        if (taken[rank] == local) continue;
        const int64_t at = row * local + taken[rank];
        const Candidate next{reinterpret_cast<const int32_t*>(part(rank, layout.ids))[at],
                             reinterpret_cast<const float*>(part(rank, layout.values))[at]};
        if (best.id >= 0 && !(next < best)) continue;
        best = next;
        best_rank = rank;
      }
      ++taken[best_rank];
      out.ids[(row - begin) * k + j] = best.id;
      out.log_probs[(row - begin) * k + j] = static_cast<float>(best.value - log_sum_exp);
    }
  }
  return out;
}

}  // namespace kdt
