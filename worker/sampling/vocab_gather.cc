#include "worker/sampling/vocab_gather.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/status.h"

namespace kdt {

absl::Status WordGather::Reserve(size_t words, int ranks) {
  const size_t bytes = words * sizeof(uint32_t);
  if (in_.bytes() < bytes) {
    KDT_ASSIGN_OR_RETURN(in_, kernels::Buffer::Make(*backend_, bytes));
  }
  if (out_.bytes() < bytes * ranks) {
    KDT_ASSIGN_OR_RETURN(out_, kernels::Buffer::Make(*backend_, bytes * ranks));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::span<const uint32_t>> WordGather::Gather(std::span<const uint32_t> words,
                                                             Collective& collective) {
  if (collective.size() == 1) return words;
  const size_t bytes = words.size_bytes();
  const size_t total = bytes * collective.size();
  KDT_RETURN_IF_ERROR(Reserve(words.size(), collective.size()));
  host_.resize(words.size() * collective.size());
  KDT_RETURN_IF_ERROR(backend_->Upload(in_.data(), words.data(), bytes));
  KDT_RETURN_IF_ERROR(collective.AllGather(in_.data(), bytes, out_.data()));
  KDT_RETURN_IF_ERROR(collective.Finish(*backend_));
  KDT_RETURN_IF_ERROR(backend_->Download(host_.data(), out_.data(), total));
  return std::span<const uint32_t>(host_);
}

void LogSum::Merge(float other_max, double other_sum) {
  if (other_max == kNoLogit) return;
  const float top = std::max(max, other_max);
  const double mine = max == kNoLogit ? 0.0 : sum * std::exp(static_cast<double>(max) - top);
  sum = mine + other_sum * std::exp(static_cast<double>(other_max) - top);
  max = top;
}

double LogSum::LogSumExp() const { return static_cast<double>(max) + std::log(sum); }

}  // namespace kdt
