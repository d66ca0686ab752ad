#include "worker/sampling/argmax_draw.h"

#include <cstring>

#include "common/status.h"

namespace kdt {
namespace {

using kernels::Buffer;

constexpr int64_t kWords = 3;     // of a record
constexpr int64_t kRowsUnit = 4;  // a rank's records take a multiple of 16 bytes

int64_t Pitch(int64_t rows) { return (rows + kRowsUnit - 1) / kRowsUnit * kRowsUnit; }
size_t Bytes(int64_t rows) { return static_cast<size_t>(Pitch(rows) * kWords) * sizeof(uint32_t); }

}  // namespace

bool DrawsByArgmax(const SampleRow& row) {
  return row.sequence != nullptr && row.top < 0 && !row.sequence->params().Truncates() &&
         !row.sequence->EditsAt(row.position);
}

absl::StatusOr<std::unique_ptr<ArgmaxDraw>> ArgmaxDraw::Create(kernels::Backend* backend, Shard shard,
                                                               int64_t vocab_size, int64_t max_rows) {
  auto draw = std::unique_ptr<ArgmaxDraw>(new ArgmaxDraw(backend, shard, vocab_size));
  KDT_ASSIGN_OR_RETURN(draw->mine_, Buffer::Make(*backend, Bytes(max_rows)));
  KDT_ASSIGN_OR_RETURN(draw->host_, kernels::HostBuffer::Make(*backend, Bytes(max_rows) * shard.size));
  if (shard.size == 1) return draw;
  KDT_ASSIGN_OR_RETURN(draw->all_, Buffer::Make(*backend, Bytes(max_rows) * shard.size));
  return draw;
}

absl::Status ArgmaxDraw::Queue(const kernels::Tensor& logits, const Keys& keys, Collective& collective) {
  const int64_t pitch = Pitch(logits.rows);
  const size_t bytes = Bytes(logits.rows);
  KDT_RETURN_IF_ERROR(backend_->GumbelArgmax({logits, shard_.Begin(vocab_size_), keys.temperature, keys.seed,
                                              keys.position, mine_.as<int32_t>(), mine_.as<float>() + pitch,
                                              mine_.as<int32_t>() + 2 * pitch}));
  if (shard_.size == 1) return backend_->DownloadAsync(host_.data(), mine_.data(), bytes);
  KDT_RETURN_IF_ERROR(collective.AllGather(mine_.data(), bytes, all_.data()));
  return backend_->DownloadAsync(host_.data(), all_.data(), bytes * shard_.size);
}

void ArgmaxDraw::Merge(int64_t queued, int64_t rows, std::vector<SampledRow>* out) const {
  const int64_t pitch = Pitch(queued);
  out->assign(rows, {});
  for (int64_t row = 0; row < rows; ++row) {
    SampledRow& result = (*out)[row];
    float best = 0;
    for (int rank = 0; rank < shard_.size; ++rank) {
      const char* const record = host_.data() + rank * Bytes(queued);
      const auto* const words = reinterpret_cast<const int32_t*>(record);
      float value = 0;
      std::memcpy(&value, words + pitch + row, sizeof(value));
      const int32_t id = words[row];
      result.bad |= words[2 * pitch + row] != 0;
      // Ranks rise with ids: a tie stays with the lower.
      if (id < 0 || (result.token >= 0 && value <= best)) continue;
      result.token = id;
      best = value;
    }
    result.bad |= result.token < 0;
  }
}

}  // namespace kdt
