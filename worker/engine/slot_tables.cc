#include "worker/engine/slot_tables.h"

#include <algorithm>
#include <cstring>

#include "common/status.h"

namespace kdt {
namespace {

// Values of the copies of one step; more than these wait for the device in between, which only happens when
// long tables change whole.
constexpr int64_t kStagedValues = 1 << 18;

}  // namespace

absl::Status SlotTables::Allocate(kernels::Backend& backend, int64_t rows, int64_t stride) {
  backend_ = &backend;
  stride_ = stride;
  rows_.resize(rows);
  KDT_ASSIGN_OR_RETURN(device_, kernels::Buffer::Make(backend, rows * stride * sizeof(int32_t)));
  KDT_ASSIGN_OR_RETURN(
      staging_, kernels::HostBuffer::Make(backend, std::min(kStagedValues, rows * stride) * sizeof(int32_t)));
  return absl::OkStatus();
}

void SlotTables::Forget() {
  for (Row& row : rows_) row.known = 0;
}

void SlotTables::Clear() {
  for (Row& row : rows_) row = {};
  staged_ = 0;
}

absl::Status SlotTables::Set(int64_t row, uint64_t id, std::span<const int32_t> table, int64_t fresh) {
  Row& now = rows_[row];
  std::vector<int32_t>& mirror = now.mirror;
  const int64_t known = now.id == id ? std::min(now.known, fresh) : 0;
  const int64_t common = std::min<int64_t>(static_cast<int64_t>(mirror.size()), fresh);
  int64_t begin = std::min(known, common);
  begin = std::mismatch(table.begin() + begin, table.begin() + common, mirror.begin() + begin).first -
          table.begin();
  mirror.resize(begin);
  mirror.insert(mirror.end(), table.begin() + begin, table.end());
  now.id = id;
  now.known = fresh;
  return CopyUp(Index(row, begin), table.subspan(begin, fresh - begin));
}

absl::Status SlotTables::CopyUp(int64_t at, std::span<const int32_t> values) {
  const auto room = static_cast<int64_t>(staging_.bytes() / sizeof(int32_t));
  while (!values.empty()) {
    if (staged_ == room) {
      KDT_RETURN_IF_ERROR(backend_->Synchronize());
      staged_ = 0;
    }
    const int64_t count = std::min<int64_t>(static_cast<int64_t>(values.size()), room - staged_);
    char* const from = staging_.data() + staged_ * sizeof(int32_t);
    std::memcpy(from, values.data(), count * sizeof(int32_t));
    KDT_RETURN_IF_ERROR(backend_->UploadAsync(data() + at, from, count * sizeof(int32_t)));
    staged_ += count;
    at += count;
    values = values.subspan(count);
  }
  return absl::OkStatus();
}

}  // namespace kdt
