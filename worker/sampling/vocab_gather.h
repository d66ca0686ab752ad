// Gathering of small records from all ranks, and the merge of what each rank knows of its part of the
// vocabulary.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kdt/kernels/backend.h"
#include "worker/collective/collective.h"

namespace kdt {

// Gathers host words from all ranks through the backend's memory. Grows to its largest use; Reserve does so
// beforehand.
class WordGather {
 public:
  explicit WordGather(kernels::Backend* backend) : backend_(backend) {}

  // Room for `words` from each of `ranks`.
  absl::Status Reserve(size_t words, int ranks);

  // Every rank passes the same number of words; the result holds rank 0's, rank 1's, ... Valid until the next
  // call.
  absl::StatusOr<std::span<const uint32_t>> Gather(std::span<const uint32_t> words, Collective& collective);

 private:
  kernels::Backend* backend_;
  kernels::Buffer in_, out_;
  std::vector<uint32_t> host_;
};

// Maximum and sum of exp(x - maximum) of a set of logits.
struct LogSum {
  float max;
  double sum;
  // Takes in another set; called in rank order, so that all ranks get the same bits.
  void Merge(float other_max, double other_sum);
  double LogSumExp() const;
};
inline constexpr float kNoLogit = -__builtin_inff();
inline constexpr LogSum kEmptyLogSum{kNoLogit, 0};

}  // namespace kdt
