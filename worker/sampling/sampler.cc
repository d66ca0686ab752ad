#include "worker/sampling/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "common/status.h"

namespace kdt {
namespace {

using kernels::Buffer;
using kernels::kMaxTopK;
using kernels::Tensor;

uint32_t Word(float value) { return std::bit_cast<uint32_t>(value); }
uint32_t Word(int32_t value) { return std::bit_cast<uint32_t>(value); }

// Reads one rank's record of a row.
class Reader {
 public:
  explicit Reader(const uint32_t* at) : at_(at) {}
  float Float() { return std::bit_cast<float>(*at_++); }
  int32_t Int() { return std::bit_cast<int32_t>(*at_++); }

 private:
  const uint32_t* at_;
};

bool DrawsLocally(const SampleRow& row) {
  return row.sequence != nullptr && !row.sequence->params().Truncates();
}
bool Truncates(const SampleRow& row) { return row.sequence != nullptr && row.sequence->params().Truncates(); }

}  // namespace

Sampler::Sampler(kernels::Backend* backend, Shard shard, int64_t vocab_size)
    : backend_(backend),
      shard_(shard),
      vocab_size_(vocab_size),
      vocab_begin_(shard.Begin(vocab_size)),
      vocab_local_(shard.Count(vocab_size)),
      candidates_(std::min<int64_t>(kMaxTopK, vocab_local_)),
      editor_(vocab_begin_, vocab_local_),
      gather_(backend) {}

absl::StatusOr<std::unique_ptr<Sampler>> Sampler::Create(kernels::Backend* backend, Shard shard,
                                                         int64_t vocab_size, int64_t max_rows) {
  auto sampler = std::unique_ptr<Sampler>(new Sampler(backend, shard, vocab_size));
  KDT_RETURN_IF_ERROR(sampler->Allocate(sampler->raw_, max_rows));
  KDT_RETURN_IF_ERROR(sampler->Allocate(sampler->adjusted_, max_rows));
  for (Mirror<float>* mirror : {&sampler->temperature_, &sampler->scale_, &sampler->drawn_value_}) {
    KDT_RETURN_IF_ERROR(mirror->Allocate(*backend, max_rows));
  }
  KDT_RETURN_IF_ERROR(sampler->seed_.Allocate(*backend, max_rows));
  KDT_RETURN_IF_ERROR(sampler->position_.Allocate(*backend, max_rows));
  KDT_RETURN_IF_ERROR(sampler->drawn_id_.Allocate(*backend, max_rows));
  KDT_ASSIGN_OR_RETURN(sampler->whole_row_, Buffer::Make(*backend, vocab_size * sizeof(float)));
  // The largest record: both kinds of k best, and a few words.
  if (shard.size > 1)
    KDT_RETURN_IF_ERROR(sampler->gather_.Reserve(max_rows * (4 * kMaxTopK + 8), shard.size));
  return sampler;
}

template <typename T>
absl::Status Sampler::Mirror<T>::Allocate(kernels::Backend& backend, int64_t count) {
  KDT_ASSIGN_OR_RETURN(device, Buffer::Make(backend, count * sizeof(T)));
  KDT_ASSIGN_OR_RETURN(memory, kernels::HostBuffer::Make(backend, count * sizeof(T)));
  return absl::OkStatus();
}

absl::Status Sampler::Allocate(TopK& top, int64_t max_rows) {
  KDT_RETURN_IF_ERROR(top.max.Allocate(*backend_, max_rows));
  KDT_RETURN_IF_ERROR(top.sum.Allocate(*backend_, max_rows));
  KDT_RETURN_IF_ERROR(top.bad.Allocate(*backend_, max_rows));
  KDT_RETURN_IF_ERROR(top.ids.Allocate(*backend_, max_rows * kMaxTopK));
  return top.values.Allocate(*backend_, max_rows * kMaxTopK);
}

template <typename K>
absl::Status Sampler::RunTopK(const Tensor& logits, const K& k, TopK& top) {
  const int64_t rows = logits.rows;
  bool lists = false;
  for (int64_t begin = 0, end; begin < rows; begin = end) {
    const int64_t count_k = k(begin);
    for (end = begin + 1; end < rows && k(end) == count_k; ++end) {
    }
    if (count_k < 0) continue;
    lists = lists || count_k > 0;
    KDT_RETURN_IF_ERROR(backend_->LogitsTopK(
        {logits.Rows(begin, end - begin), vocab_begin_, count_k, top.max.on_device() + begin,
         top.sum.on_device() + begin, top.bad.on_device() + begin, top.ids.on_device() + begin * kMaxTopK,
         top.values.on_device() + begin * kMaxTopK}));
  }
  KDT_RETURN_IF_ERROR(top.max.Down(*backend_, rows));
  KDT_RETURN_IF_ERROR(top.sum.Down(*backend_, rows));
  KDT_RETURN_IF_ERROR(top.bad.Down(*backend_, rows));
  if (lists) {
    KDT_RETURN_IF_ERROR(top.ids.Down(*backend_, rows * kMaxTopK));
    KDT_RETURN_IF_ERROR(top.values.Down(*backend_, rows * kMaxTopK));
  }
  KDT_RETURN_IF_ERROR(backend_->Synchronize());
  for (int64_t begin = 0, end; lists && begin < rows; begin = end) {
    const int64_t count_k = k(begin);
    for (end = begin + 1; end < rows && k(end) == count_k; ++end) {
    }
    // The device's rows are count_k apart, the host's kMaxTopK: spread from the last row, which moves
    // furthest.
    int32_t* ids = top.ids.host() + begin * kMaxTopK;
    float* values = top.values.host() + begin * kMaxTopK;
    for (int64_t i = end - begin - 1; i > 0 && count_k > 0; --i) {
      std::copy_backward(ids + i * count_k, ids + (i + 1) * count_k, ids + i * kMaxTopK + count_k);
      std::copy_backward(values + i * count_k, values + (i + 1) * count_k, values + i * kMaxTopK + count_k);
    }
  }
  return absl::OkStatus();
}

absl::Status Sampler::EditLogits(const Tensor& logits, std::span<const SampleRow> rows) {
  raw_copies_.resize(std::max(raw_copies_.size(), rows.size()));
  std::vector<float> values;
  bool scales = false;
  for (size_t i = 0; i < rows.size(); ++i) {
    raw_copies_[i].clear();
    scale_.host()[i] = 1;
    const SampleRow& row = rows[i];
    if (row.sequence == nullptr) continue;
    const SamplingParams& params = row.sequence->params();
    // Elsewhere GumbelArgmax divides; the arithmetic is the same.
    if (params.Truncates()) scale_.host()[i] = 1.0f / params.temperature;
    scales = scales || scale_.host()[i] != 1;
    const bool edits = row.sequence->EditsAt(row.position);
    if (!edits && (scale_.host()[i] == 1 || row.top < 0)) continue;
    values.resize(vocab_local_);
    void* device = logits.Rows(i, 1).data;
    const size_t bytes = vocab_local_ * sizeof(float);
    KDT_RETURN_IF_ERROR(backend_->Download(values.data(), device, bytes));
    if (row.top >= 0) raw_copies_[i] = values;
    if (!edits) continue;
    editor_.Apply(*row.sequence, row.path, row.position, values.data());
    KDT_RETURN_IF_ERROR(backend_->Upload(device, values.data(), bytes));
  }
  if (!scales) return absl::OkStatus();
  KDT_RETURN_IF_ERROR(scale_.Up(*backend_, logits.rows));
  return backend_->ScaleRows({logits, scale_.on_device()});
}

template <typename Draws>
absl::Status Sampler::DrawLocal(const Tensor& logits, std::span<const SampleRow> rows, const Draws& draws) {
  const int64_t n = logits.rows;
  for (int64_t i = 0; i < n; ++i) {
    temperature_.host()[i] = 0;
    seed_.host()[i] = 0;
    position_.host()[i] = 0;
    if (!draws(i)) continue;
    const SamplingParams& params = rows[i].sequence->params();
    temperature_.host()[i] =
        params.Truncates() ? 1.0f : params.temperature;  // truncated rows have been divided
    seed_.host()[i] = params.seed;
    position_.host()[i] = rows[i].position;
  }
  KDT_RETURN_IF_ERROR(temperature_.Up(*backend_, n));
  KDT_RETURN_IF_ERROR(seed_.Up(*backend_, n));
  KDT_RETURN_IF_ERROR(position_.Up(*backend_, n));
  for (int64_t begin = 0, end; begin < n; begin = end) {
    const bool draw = draws(begin);
    for (end = begin + 1; end < n && draws(end) == draw; ++end) {
    }
    if (!draw) continue;
    KDT_RETURN_IF_ERROR(backend_->GumbelArgmax({logits.Rows(begin, end - begin), vocab_begin_,
                                                temperature_.on_device() + begin, seed_.on_device() + begin,
                                                position_.on_device() + begin, drawn_id_.on_device() + begin,
                                                drawn_value_.on_device() + begin}));
  }
  KDT_RETURN_IF_ERROR(drawn_id_.Down(*backend_, n));
  KDT_RETURN_IF_ERROR(drawn_value_.Down(*backend_, n));
  return backend_->Synchronize();
}

absl::StatusOr<float> Sampler::RawLogit(const Tensor& logits, int64_t row, int32_t token) {
  if (!Owns(token)) return 0.0f;
  const int64_t local = token - vocab_begin_;
  if (!raw_copies_[row].empty()) return raw_copies_[row][local];
  float value = 0;
  KDT_RETURN_IF_ERROR(backend_->Download(&value, logits.Rows(row, 1).f32() + local, sizeof(value)));
  return value;
}

// A row's record: maximum and sum of the model's logits, whether they are bad; then what the row asks for.
absl::Status Sampler::Pack(const Tensor& logits, std::span<const SampleRow> rows) {
  words_.clear();
  for (size_t i = 0; i < rows.size(); ++i) {
    const SampleRow& row = rows[i];
    words_.insert(words_.end(),
                  {Word(raw_.max.host()[i]), Word(raw_.sum.host()[i]), uint32_t{raw_.bad.host()[i]}});
    if (DrawsLocally(row)) {
      float raw = 0;
      if (row.top >= 0) {
        KDT_ASSIGN_OR_RETURN(raw, RawLogit(logits, i, drawn_id_.host()[i]));
      }
      words_.insert(words_.end(), {Word(drawn_id_.host()[i]), Word(drawn_value_.host()[i]), Word(raw)});
    }
    if (Truncates(row)) {
      words_.insert(words_.end(), {Word(adjusted_.max.host()[i]), Word(adjusted_.sum.host()[i])});
      for (int64_t j = 0; j < candidates_; ++j) {
        words_.push_back(Word(adjusted_.ids.host()[i * kMaxTopK + j]));
        words_.push_back(Word(adjusted_.values.host()[i * kMaxTopK + j]));
      }
    }
    if (row.given >= 0) {
      KDT_ASSIGN_OR_RETURN(const float raw, RawLogit(logits, i, row.given));
      words_.push_back(Word(raw));
    }
    for (int64_t j = 0; j < std::min(row.top, vocab_local_); ++j) {
      words_.push_back(Word(raw_.ids.host()[i * kMaxTopK + j]));
      words_.push_back(Word(raw_.values.host()[i * kMaxTopK + j]));
    }
  }
  return absl::OkStatus();
}

void Sampler::Merge(std::span<const uint32_t> words, std::span<const SampleRow> rows,
                    std::vector<SampledRow>* out) {
  const size_t per_rank = words.size() / shard_.size;
  log_sum_exp_.assign(rows.size(), 0);
  adjusted_sum_.assign(rows.size(), kEmptyLogSum);
  undecided_.clear();
  std::vector<Candidate> best;
  std::vector<Candidate> tops;
  size_t offset = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const SampleRow& row = rows[i];
    SampledRow& result = (*out)[i];
    LogSum raw_sum = kEmptyLogSum;
    const int64_t top = std::min(row.top, vocab_local_);
    float drawn_value = 0;
    float raw = 0;
    best.clear();
    tops.clear();
    // How far the merged candidates are sure to be the vocabulary's best: up to the worst that a rank listed.
    Candidate sure{-1, kNoLogit};
    for (int r = 0; r < shard_.size; ++r) {
      Reader reader(words.data() + r * per_rank + offset);
      const float max = reader.Float();
      const float sum = reader.Float();
      raw_sum.Merge(max, sum);
      result.bad |= reader.Int() != 0;
      if (DrawsLocally(row)) {
        const int32_t id = reader.Int();
        const float value = reader.Float();
        const float id_raw = reader.Float();
        if (id >= 0 &&
            (result.token < 0 || value > drawn_value)) {  // ranks rise with ids: a tie stays with the lower
          result.token = id;
          drawn_value = value;
          raw = id_raw;
        }
      }
      if (Truncates(row)) {
        const float adjusted_max = reader.Float();
        const float adjusted_exp = reader.Float();
        adjusted_sum_[i].Merge(adjusted_max, adjusted_exp);
        for (int64_t j = 0; j < candidates_; ++j) {
          const int32_t id = reader.Int();
          best.push_back({id, reader.Float()});
        }
        if (candidates_ < vocab_local_ && (sure.id < 0 || best.back() < sure)) sure = best.back();
      }
      if (row.given >= 0) {
        const float given_raw = reader.Float();
        if (row.given / vocab_local_ == r) raw = given_raw;
        result.token = row.given;
      }
      for (int64_t j = 0; j < top; ++j) {
        const int32_t id = reader.Int();
        tops.push_back({id, reader.Float()});
      }
    }
    offset += 3 + (DrawsLocally(row) ? 3 : 0) + (Truncates(row) ? 2 + 2 * candidates_ : 0) +
              (row.given >= 0 ? 1 : 0) + 2 * std::max<int64_t>(top, 0);

    if (result.bad) continue;  // a NaN has no order
    if (Truncates(row)) {
      std::sort(best.begin(), best.end());
      if (sure.id >= 0) {
        const auto behind = std::upper_bound(best.begin(), best.end(), sure);
        best.erase(behind, best.end());
      }
      const SamplingParams& params = row.sequence->params();
      if (best[0].value != kNoLogit) {
        const auto kept = KeptCount(params, best, vocab_size_, adjusted_sum_[i].sum);
        if (kept) {
          result.token = DrawAmong({best.data(), static_cast<size_t>(*kept)}, params.seed, row.position);
        } else {
          undecided_.push_back(i);
        }
      }
    }
    if (row.top < 0) continue;
    log_sum_exp_[i] = raw_sum.LogSumExp();
    result.logprob = static_cast<float>(raw - log_sum_exp_[i]);
    std::sort(tops.begin(), tops.end());
    tops.resize(std::min<size_t>(tops.size(), row.top));
    for (const Candidate& c : tops)
      result.top.emplace_back(c.id, static_cast<float>(c.value - log_sum_exp_[i]));
  }
}

absl::Status Sampler::DrawUndecided(const Tensor& logits, std::span<const SampleRow> rows,
                                    Collective& collective, std::vector<SampledRow>* out) {
  std::vector<int64_t> nuclei;
  for (int64_t i : undecided_) {
    if (rows[i].sequence->params().top_k > 0) {
      KDT_RETURN_IF_ERROR(DrawFromWholeRow(logits, i, rows[i], collective, &(*out)[i]));
    } else {
      nuclei.push_back(i);
    }
  }
  if (nuclei.empty()) return absl::OkStatus();
  KDT_RETURN_IF_ERROR(DrawLocal(
      logits, rows, [&](int64_t i) { return std::binary_search(nuclei.begin(), nuclei.end(), i); }));
  std::vector<NucleusRow> draws(nuclei.size());
  for (size_t j = 0; j < nuclei.size(); ++j) {
    const int64_t i = nuclei[j];
    draws[j].params = &rows[i].sequence->params();
    draws[j].position = rows[i].position;
    draws[j].total = adjusted_sum_[i];
    draws[j].values.resize(vocab_local_);
    KDT_RETURN_IF_ERROR(
        backend_->Download(draws[j].values.data(), logits.Rows(i, 1).data, vocab_local_ * sizeof(float)));
    draws[j].local_id = drawn_id_.host()[i];
    draws[j].local_noisy = drawn_value_.host()[i];
  }
  KDT_RETURN_IF_ERROR(DrawFromNuclei(draws, vocab_begin_, gather_, collective));
  for (size_t j = 0; j < nuclei.size(); ++j) (*out)[nuclei[j]].token = draws[j].drawn;
  return absl::OkStatus();
}

absl::Status Sampler::DrawFromWholeRow(const Tensor& logits, int64_t row, const SampleRow& request,
                                       Collective& collective, SampledRow* out) {
  std::vector<float> values(vocab_size_);
  const float* mine = logits.Rows(row, 1).f32();
  if (shard_.size > 1) {
    KDT_RETURN_IF_ERROR(collective.AllGather(mine, vocab_local_ * sizeof(float), whole_row_.data()));
    KDT_RETURN_IF_ERROR(collective.Finish(*backend_));
    mine = whole_row_.as<float>();
  }
  KDT_RETURN_IF_ERROR(backend_->Download(values.data(), mine, vocab_size_ * sizeof(float)));
  std::vector<Candidate> best(vocab_size_);
  for (int64_t id = 0; id < vocab_size_; ++id) best[id] = {static_cast<int32_t>(id), values[id]};
  const SamplingParams& params = request.sequence->params();
  std::partial_sort(best.begin(), best.begin() + params.top_k, best.end());
  best.resize(params.top_k);
  const auto kept = KeptCount(params, best, vocab_size_, adjusted_sum_[row].sum);
  KDT_CHECK(kept.has_value());
  out->token = DrawAmong({best.data(), static_cast<size_t>(*kept)}, params.seed, request.position);
  return absl::OkStatus();
}

// The owner of a drawn token tells the others the model's logit of it.
absl::Status Sampler::FetchDrawnLogits(const Tensor& logits, std::span<const SampleRow> rows,
                                       Collective& collective, std::vector<SampledRow>* out) {
  words_.clear();
  std::vector<size_t> asked;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (!Truncates(rows[i]) || rows[i].top < 0 || (*out)[i].token < 0) continue;
    asked.push_back(i);
    KDT_ASSIGN_OR_RETURN(const float raw, RawLogit(logits, i, (*out)[i].token));
    words_.push_back(Word(raw));
  }
  if (asked.empty()) return absl::OkStatus();
  KDT_ASSIGN_OR_RETURN(const auto words, gather_.Gather(words_, collective));
  for (size_t j = 0; j < asked.size(); ++j) {
    SampledRow& result = (*out)[asked[j]];
    const int64_t owner = result.token / vocab_local_;
    const float raw = std::bit_cast<float>(words[owner * asked.size() + j]);
    result.logprob = static_cast<float>(raw - log_sum_exp_[asked[j]]);
  }
  return absl::OkStatus();
}

absl::Status Sampler::Sample(const Tensor& logits, std::span<const SampleRow> rows, Collective& collective,
                             std::vector<SampledRow>* out) {
  KDT_CHECK(logits.rows == static_cast<int64_t>(rows.size()) && logits.cols == vocab_local_);
  out->assign(rows.size(), {});
  // The reductions in front of the logits are over before anything waits for the device without a deadline.
  KDT_RETURN_IF_ERROR(collective.Finish(*backend_));
  KDT_RETURN_IF_ERROR(RunTopK(
      logits, [&](int64_t i) { return std::max<int64_t>(0, std::min(rows[i].top, vocab_local_)); }, raw_));
  KDT_RETURN_IF_ERROR(EditLogits(logits, rows));
  if (std::any_of(rows.begin(), rows.end(), Truncates)) {
    KDT_RETURN_IF_ERROR(RunTopK(
        logits, [&](int64_t i) { return Truncates(rows[i]) ? candidates_ : -1; }, adjusted_));
  }
  if (std::any_of(rows.begin(), rows.end(), DrawsLocally)) {
    KDT_RETURN_IF_ERROR(DrawLocal(logits, rows, [&](int64_t i) { return DrawsLocally(rows[i]); }));
  }
  KDT_RETURN_IF_ERROR(Pack(logits, rows));
  KDT_ASSIGN_OR_RETURN(const auto words, gather_.Gather(words_, collective));
  Merge(words, rows, out);
  KDT_RETURN_IF_ERROR(DrawUndecided(logits, rows, collective, out));
  KDT_RETURN_IF_ERROR(FetchDrawnLogits(logits, rows, collective, out));
  // Everything masked: there is no token to draw.
  for (SampledRow& row : *out) row.bad |= row.token < 0;
  return absl::OkStatus();
}

}  // namespace kdt
