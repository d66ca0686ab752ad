#include "worker/draft/draft_top_k.h"

#include <algorithm>
#include <bit>

#include "common/status.h"
#include "worker/sampling/truncation.h"

namespace kdt {

using kernels::Buffer;
using kernels::kMaxTopK;
using kernels::Tensor;

absl::StatusOr<std::unique_ptr<DraftTopK>> DraftTopK::Create(kernels::Backend* backend, Shard shard,
                                                             int64_t vocab_size, int64_t max_rows) {
  auto top = std::unique_ptr<DraftTopK>(new DraftTopK(backend, shard, vocab_size));
  for (Buffer* buffer : {&top->max_, &top->sum_exp_, &top->bad_}) {
    KDT_ASSIGN_OR_RETURN(*buffer, Buffer::Make(*backend, max_rows * sizeof(float)));
  }
  for (Buffer* buffer : {&top->ids_, &top->values_}) {
    KDT_ASSIGN_OR_RETURN(*buffer, Buffer::Make(*backend, max_rows * kMaxTopK * sizeof(float)));
  }
  if (shard.size > 1) KDT_RETURN_IF_ERROR(top->gather_.Reserve(max_rows * (2 * kMaxTopK + 3), shard.size));
  return top;
}

absl::Status DraftTopK::Run(const Tensor& logits, int64_t k, Collective& collective, DraftCandidates* out) {
  const int64_t rows = logits.rows;
  const int64_t local = std::min(k, logits.cols);
  KDT_RETURN_IF_ERROR(
      backend_->LogitsTopK({logits, shard_.Begin(vocab_size_), local, max_.as<float>(), sum_exp_.as<float>(),
                            bad_.as<uint8_t>(), ids_.as<int32_t>(), values_.as<float>()}));
  // The reductions in front of the logits are over before the downloads wait without a deadline.
  KDT_RETURN_IF_ERROR(collective.Finish(*backend_));
  host_max_.resize(rows);
  host_sum_.resize(rows);
  host_bad_.resize(rows);
  host_ids_.resize(rows * local);
  host_values_.resize(rows * local);
  KDT_RETURN_IF_ERROR(backend_->Download(host_max_.data(), max_.data(), rows * sizeof(float)));
  KDT_RETURN_IF_ERROR(backend_->Download(host_sum_.data(), sum_exp_.data(), rows * sizeof(float)));
  KDT_RETURN_IF_ERROR(backend_->Download(host_bad_.data(), bad_.data(), rows));
  KDT_RETURN_IF_ERROR(backend_->Download(host_ids_.data(), ids_.data(), rows * local * sizeof(int32_t)));
  KDT_RETURN_IF_ERROR(backend_->Download(host_values_.data(), values_.data(), rows * local * sizeof(float)));

  // A row's record: maximum, sum, bad, ids, values.
  const size_t record = 3 + 2 * local;
  words_.clear();
  for (int64_t row = 0; row < rows; ++row) {
    words_.insert(words_.end(), {std::bit_cast<uint32_t>(host_max_[row]),
                                 std::bit_cast<uint32_t>(host_sum_[row]), uint32_t{host_bad_[row]}});
    for (int64_t j = 0; j < local; ++j) words_.push_back(std::bit_cast<uint32_t>(host_ids_[row * local + j]));
    for (int64_t j = 0; j < local; ++j)
      words_.push_back(std::bit_cast<uint32_t>(host_values_[row * local + j]));
  }
  KDT_ASSIGN_OR_RETURN(const auto words, gather_.Gather(words_, collective));

  out->k = k;
  out->ids.assign(rows * k, 0);
  out->log_probs.assign(rows * k, 0);
  out->bad.assign(rows, 0);
  std::vector<Candidate> best;
  for (int64_t row = 0; row < rows; ++row) {
    LogSum sum = kEmptyLogSum;
    best.clear();
    for (int r = 0; r < shard_.size; ++r) {
      const uint32_t* at = words.data() + (r * rows + row) * record;
      sum.Merge(std::bit_cast<float>(at[0]), std::bit_cast<float>(at[1]));
      out->bad[row] |= at[2] != 0;
      for (int64_t j = 0; j < local; ++j) {
        best.push_back({std::bit_cast<int32_t>(at[3 + j]), std::bit_cast<float>(at[3 + local + j])});
      }
    }
    if (out->bad[row]) continue;
    std::partial_sort(best.begin(), best.begin() + k, best.end());
    const double log_sum_exp = sum.LogSumExp();
    for (int64_t j = 0; j < k; ++j) {
      out->ids[row * k + j] = best[j].id;
      out->log_probs[row * k + j] = static_cast<float>(best[j].value - log_sum_exp);
    }
  }
  return absl::OkStatus();
}

}  // namespace kdt
