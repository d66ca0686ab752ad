// Picks a token for each row of logits that each rank holds a vocabulary shard of. Ranks exchange one small
// record a row (whole rows only where top_p needs them), and every rank comes to the same choice from the
// same gathered bytes.
//
// Order of a draw: penalties, bias, min_tokens mask, temperature, top_k, top_p, min_p, then the keyed Gumbel
// argmax (common/rng.h). Logprobs are log_softmax of the model's own logits.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kdt/kernels/backend.h"
#include "worker/collective/collective.h"
#include "worker/model/shard.h"
#include "worker/sampling/logit_edits.h"
#include "worker/sampling/nucleus_draw.h"
#include "worker/sampling/truncation.h"
#include "worker/sampling/vocab_gather.h"

namespace kdt {

// What is asked of a row: a draw (sequence set), or the logprob of a token that is known (given >= 0).
struct SampleRow {
  const SequenceSampling* sequence = nullptr;
  std::span<const int32_t>
      path;              // tokens between the committed ones and the drawn one; needed with penalties only
  int64_t position = 0;  // absolute position of the drawn token
  int32_t given = -1;
  int64_t top = -1;  // how many best tokens to report beside the logprob; -1: no logprob at all
};

struct SampledRow {
  bool bad =
      false;  // a NaN or infinity in the logits, or nothing left to draw from: the fields below mean nothing
  int32_t token = -1;  // drawn or given
  float logprob = 0;
  std::vector<std::pair<int32_t, float>> top;  // best first
};

class Sampler {
 public:
  static absl::StatusOr<std::unique_ptr<Sampler>> Create(kernels::Backend* backend, Shard shard,
                                                         int64_t vocab_size, int64_t max_rows);

  // logits: f32 [rows, vocab_local], changed in place. `out` gets one entry a row.
  absl::Status Sample(const kernels::Tensor& logits, std::span<const SampleRow> rows, Collective& collective,
                      std::vector<SampledRow>* out);

  // Largest `top`.
  static constexpr int64_t kMaxTop = kernels::kMaxTopK;

 private:
  // An array on the device and its copy in page-locked memory.
  template <typename T>
  struct Mirror {
    kernels::Buffer device;
    kernels::HostBuffer memory;
    absl::Status Allocate(kernels::Backend& backend, int64_t count);
    T* on_device() const { return device.as<T>(); }
    T* host() const { return reinterpret_cast<T*>(memory.data()); }
    // Queued copies of the first `count`.
    absl::Status Up(kernels::Backend& backend, int64_t count) const {
      return backend.UploadAsync(device.data(), memory.data(), count * sizeof(T));
    }
    absl::Status Down(kernels::Backend& backend, int64_t count) const {
      return backend.DownloadAsync(memory.data(), device.data(), count * sizeof(T));
    }
  };
  // LogitsTopK's results for all rows of a step; a row's k best lie at row * kMaxTopK on the host.
  struct TopK {
    Mirror<float> max, sum, values;
    Mirror<uint8_t> bad;
    Mirror<int32_t> ids;
  };

  Sampler(kernels::Backend* backend, Shard shard, int64_t vocab_size);
  absl::Status Allocate(TopK& top, int64_t max_rows);
  // Runs LogitsTopK over the rows for which k(i) >= 0, neighbours with one k together.
  template <typename K>
  absl::Status RunTopK(const kernels::Tensor& logits, const K& k, TopK& top);
  absl::Status EditLogits(const kernels::Tensor& logits, std::span<const SampleRow> rows);
  // GumbelArgmax of this shard over the rows for which draws(i).
  template <typename Draws>
  absl::Status DrawLocal(const kernels::Tensor& logits, std::span<const SampleRow> rows, const Draws& draws);
  absl::StatusOr<float> RawLogit(const kernels::Tensor& logits, int64_t row, int32_t token);
  absl::Status Pack(const kernels::Tensor& logits, std::span<const SampleRow> rows);
  void Merge(std::span<const uint32_t> words, std::span<const SampleRow> rows, std::vector<SampledRow>* out);
  absl::Status DrawUndecided(const kernels::Tensor& logits, std::span<const SampleRow> rows,
                             Collective& collective, std::vector<SampledRow>* out);
  absl::Status DrawFromWholeRow(const kernels::Tensor& logits, int64_t row, const SampleRow& request,
                                Collective& collective, SampledRow* out);
  absl::Status FetchDrawnLogits(const kernels::Tensor& logits, std::span<const SampleRow> rows,
                                Collective& collective, std::vector<SampledRow>* out);

  bool Owns(int32_t token) const { return token >= vocab_begin_ && token < vocab_begin_ + vocab_local_; }

  kernels::Backend* backend_;
  Shard shard_;
  int64_t vocab_size_;
  int64_t vocab_begin_;
  int64_t vocab_local_;
  int64_t candidates_;  // best tokens of a shard that ranks exchange for truncated rows

  TopK raw_;       // of the model's logits
  TopK adjusted_;  // of truncated rows, edited and divided by the temperature
  Mirror<float> temperature_, scale_, drawn_value_;
  Mirror<uint64_t> seed_;
  Mirror<int64_t> position_;
  Mirror<int32_t> drawn_id_;

  LogitEditor editor_;
  std::vector<std::vector<float>>
      raw_copies_;  // of rows that were changed and whose logprob is asked, else empty
  std::vector<uint32_t> words_;
  WordGather gather_;
  kernels::Buffer whole_row_;
  std::vector<double> log_sum_exp_;  // of the model's logits, by row
  std::vector<LogSum> adjusted_sum_;
  std::vector<int64_t> undecided_;  // truncated rows whose kept tokens are not proven by the candidates
};

}  // namespace kdt
