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
  for (Buffer* buffer : {&sampler->temperature_, &sampler->drawn_id_, &sampler->drawn_value_}) {
    KDT_ASSIGN_OR_RETURN(*buffer, Buffer::Make(*backend, max_rows * sizeof(float)));
  }
  for (Buffer* buffer : {&sampler->seed_, &sampler->position_}) {
    KDT_ASSIGN_OR_RETURN(*buffer, Buffer::Make(*backend, max_rows * sizeof(uint64_t)));
  }
  KDT_ASSIGN_OR_RETURN(sampler->whole_row_, Buffer::Make(*backend, vocab_size * sizeof(float)));
  // The largest record: both kinds of k best, and a few words.
  if (shard.size > 1)
    KDT_RETURN_IF_ERROR(sampler->gather_.Reserve(max_rows * (4 * kMaxTopK + 8), shard.size));
  return sampler;
}

absl::Status Sampler::Allocate(TopK& top, int64_t max_rows) {
  for (Buffer* buffer : {&top.max, &top.sum_exp, &top.bad}) {
    KDT_ASSIGN_OR_RETURN(*buffer, Buffer::Make(*backend_, max_rows * sizeof(float)));
  }
  for (Buffer* buffer : {&top.ids, &top.values}) {
    KDT_ASSIGN_OR_RETURN(*buffer, Buffer::Make(*backend_, max_rows * kMaxTopK * sizeof(float)));
  }
  return absl::OkStatus();
}

template <typename K>
absl::Status Sampler::RunTopK(const Tensor& logits, const K& k, TopK& top) {
  const int64_t rows = logits.rows;
  top.host_max.resize(rows);
  top.host_sum.resize(rows);
  top.host_bad.resize(rows);
  top.host_ids.resize(rows * kMaxTopK);
  top.host_values.resize(rows * kMaxTopK);
  for (int64_t begin = 0, end; begin < rows; begin = end) {
    const int64_t count_k = k(begin);
    for (end = begin + 1; end < rows && k(end) == count_k; ++end) {
    }
    if (count_k < 0) continue;
    const int64_t n = end - begin;
    int32_t* ids = top.ids.as<int32_t>() + begin * kMaxTopK;
    float* values = top.values.as<float>() + begin * kMaxTopK;
    KDT_RETURN_IF_ERROR(
        backend_->LogitsTopK({logits.Rows(begin, n), vocab_begin_, count_k, top.max.as<float>() + begin,
                              top.sum_exp.as<float>() + begin, top.bad.as<uint8_t>() + begin, ids, values}));
    KDT_RETURN_IF_ERROR(
        backend_->Download(top.host_max.data() + begin, top.max.as<float>() + begin, n * sizeof(float)));
    KDT_RETURN_IF_ERROR(
        backend_->Download(top.host_sum.data() + begin, top.sum_exp.as<float>() + begin, n * sizeof(float)));
    KDT_RETURN_IF_ERROR(backend_->Download(top.host_bad.data() + begin, top.bad.as<uint8_t>() + begin, n));
    if (count_k == 0) continue;
    // The device's rows are count_k apart, the host's kMaxTopK: spread from the last row, which moves
    // furthest.
    int32_t* host_ids = top.host_ids.data() + begin * kMaxTopK;
    float* host_values = top.host_values.data() + begin * kMaxTopK;
    KDT_RETURN_IF_ERROR(backend_->Download(host_ids, ids, n * count_k * sizeof(int32_t)));
    KDT_RETURN_IF_ERROR(backend_->Download(host_values, values, n * count_k * sizeof(float)));
    for (int64_t i = n - 1; i > 0; --i) {
      std::copy_backward(host_ids + i * count_k, host_ids + (i + 1) * count_k,
                         host_ids + i * kMaxTopK + count_k);
      std::copy_backward(host_values + i * count_k, host_values + (i + 1) * count_k,
                         host_values + i * kMaxTopK + count_k);
    }
  }
  return absl::OkStatus();
}

absl::Status Sampler::EditLogits(const Tensor& logits, std::span<const SampleRow> rows) {
  raw_copies_.resize(std::max(raw_copies_.size(), rows.size()));
  std::vector<float> values(vocab_local_);
  for (size_t i = 0; i < rows.size(); ++i) {
    raw_copies_[i].clear();
    const SampleRow& row = rows[i];
    if (row.sequence == nullptr) continue;
    const SamplingParams& params = row.sequence->params();
    const bool edits = row.sequence->EditsAt(row.position);
    // Elsewhere GumbelArgmax divides; the arithmetic is the same.
    const bool scales = params.Truncates() && params.temperature != 1;
    if (!edits && !scales) continue;
    void* device = logits.Rows(i, 1).data;
    const size_t bytes = vocab_local_ * sizeof(float);
    KDT_RETURN_IF_ERROR(backend_->Download(values.data(), device, bytes));
    if (row.top >= 0) raw_copies_[i] = values;
    if (edits) editor_.Apply(*row.sequence, row.path, row.position, values.data());
    if (scales) {
      const float inverse = 1.0f / params.temperature;
      for (float& value : values) value *= inverse;
    }
    KDT_RETURN_IF_ERROR(backend_->Upload(device, values.data(), bytes));
  }
  return absl::OkStatus();
}

template <typename Draws>
absl::Status Sampler::DrawLocal(const Tensor& logits, std::span<const SampleRow> rows, const Draws& draws) {
  const int64_t n = logits.rows;
  std::vector<float> temperature(n);
  std::vector<uint64_t> seed(n);
  std::vector<int64_t> position(n);
  for (int64_t i = 0; i < n; ++i) {
    if (!draws(i)) continue;
    const SamplingParams& params = rows[i].sequence->params();
    temperature[i] = params.Truncates() ? 1.0f : params.temperature;  // truncated rows have been divided
    seed[i] = params.seed;
    position[i] = rows[i].position;
  }
  KDT_RETURN_IF_ERROR(backend_->Upload(temperature_.data(), temperature.data(), n * sizeof(float)));
  KDT_RETURN_IF_ERROR(backend_->Upload(seed_.data(), seed.data(), n * sizeof(uint64_t)));
  KDT_RETURN_IF_ERROR(backend_->Upload(position_.data(), position.data(), n * sizeof(int64_t)));
  for (int64_t begin = 0, end; begin < n; begin = end) {
    const bool draw = draws(begin);
    for (end = begin + 1; end < n && draws(end) == draw; ++end) {
    }
    if (!draw) continue;
    KDT_RETURN_IF_ERROR(backend_->GumbelArgmax(
        {logits.Rows(begin, end - begin), vocab_begin_, temperature_.as<float>() + begin,
         seed_.as<uint64_t>() + begin, position_.as<int64_t>() + begin, drawn_id_.as<int32_t>() + begin,
         drawn_value_.as<float>() + begin}));
  }
  host_drawn_id_.resize(n);
  host_drawn_value_.resize(n);
  KDT_RETURN_IF_ERROR(backend_->Download(host_drawn_id_.data(), drawn_id_.data(), n * sizeof(int32_t)));
  return backend_->Download(host_drawn_value_.data(), drawn_value_.data(), n * sizeof(float));
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
    words_.insert(words_.end(), {Word(raw_.host_max[i]), Word(raw_.host_sum[i]), uint32_t{raw_.host_bad[i]}});
    if (DrawsLocally(row)) {
      float raw = 0;
      if (row.top >= 0) {
        KDT_ASSIGN_OR_RETURN(raw, RawLogit(logits, i, host_drawn_id_[i]));
      }
      words_.insert(words_.end(), {Word(host_drawn_id_[i]), Word(host_drawn_value_[i]), Word(raw)});
    }
    if (Truncates(row)) {
      words_.insert(words_.end(), {Word(adjusted_.host_max[i]), Word(adjusted_.host_sum[i])});
      for (int64_t j = 0; j < candidates_; ++j) {
        words_.push_back(Word(adjusted_.host_ids[i * kMaxTopK + j]));
        words_.push_back(Word(adjusted_.host_values[i * kMaxTopK + j]));
      }
    }
    if (row.given >= 0) {
      KDT_ASSIGN_OR_RETURN(const float raw, RawLogit(logits, i, row.given));
      words_.push_back(Word(raw));
    }
    for (int64_t j = 0; j < std::min(row.top, vocab_local_); ++j) {
      words_.push_back(Word(raw_.host_ids[i * kMaxTopK + j]));
      words_.push_back(Word(raw_.host_values[i * kMaxTopK + j]));
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
    draws[j].local_id = host_drawn_id_[i];
    draws[j].local_noisy = host_drawn_value_[i];
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
