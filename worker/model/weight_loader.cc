#include "worker/model/weight_loader.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/int4.h"
#include "common/status.h"

namespace kdt {
namespace {

// What lies in one stretch is cut into rows of this many bytes, so that it can be spread over buffers.
constexpr int64_t kStretchBytes = 1 << 20;
constexpr int64_t kBf16Bytes = 2;
constexpr int64_t kWordBytes = 4;

}  // namespace

absl::StatusOr<char*> WeightLoader::Allocate(uint64_t bytes) {
  if (mode_ == Mode::kPlan) return nullptr;
  KDT_ASSIGN_OR_RETURN(kernels::Buffer buffer, kernels::Buffer::Make(*backend_, bytes));
  buffers_.push_back(std::move(buffer));
  return buffers_.back().as<char>();
}

void WeightLoader::Copy(const TensorView& tensor, int64_t row_begin, int64_t rows, int64_t source_row_bytes,
                        int64_t byte_begin, int64_t row_bytes, char* to) {
  bytes_ += rows * row_bytes;
  if (mode_ == Mode::kPlan) return;
  if (row_bytes == source_row_bytes) {  // one stretch; cut where a buffer ends
    const int64_t unit = std::min(rows * row_bytes, kStretchBytes);
    copy_.Add({tensor.bytes.data() + row_begin * row_bytes, rows * row_bytes / unit, unit, unit, to,
               noted_.size()});
    if (const int64_t rest = rows * row_bytes % unit; rest > 0) {
      const int64_t done = rows * row_bytes - rest;
      copy_.Add(
          {tensor.bytes.data() + row_begin * row_bytes + done, 1, rest, rest, to + done, noted_.size()});
    }
  } else {
    copy_.Add({tensor.bytes.data() + row_begin * source_row_bytes + byte_begin, rows, source_row_bytes,
               row_bytes, to, noted_.size()});
  }
  noted_.push_back({source_, tensor});
}

absl::Status WeightLoader::Finish(int threads) {
  if (mode_ == Mode::kPlan) return absl::OkStatus();
  const std::vector<Noted> noted = std::exchange(noted_, {});
  uint64_t done = constant_bytes_;
  KDT_RETURN_IF_ERROR(copy_.Run(
      *backend_, threads,
      [&](size_t tag, std::span<const std::byte> bytes) {
        noted[tag].source->Release(noted[tag].tensor, bytes);
      },
      [&](uint64_t bytes) {
        done += bytes;
        if (progress_) progress_(done, total_);
      }));
  for (const kernels::Int4Experts& experts : std::exchange(experts_, {})) {
    KDT_RETURN_IF_ERROR(backend_->PrepareExperts(experts));
  }
  return backend_->Synchronize();
}

absl::Status WeightLoader::CopyPart(const Part& part, char* to) {
  KDT_ASSIGN_OR_RETURN(const TensorView tensor,
                       source_->Find(part.name, {DType::kBF16}, {part.out, part.in}));
  const bool rows = part.split == Split::kRows;
  const bool columns = part.split == Split::kColumns;
  Copy(tensor, rows ? shard_.Begin(part.out) : 0, rows ? shard_.Count(part.out) : part.out,
       part.in * kBf16Bytes, columns ? shard_.Begin(part.in) * kBf16Bytes : 0,
       (columns ? shard_.Count(part.in) : part.in) * kBf16Bytes, to);
  return absl::OkStatus();
}

absl::StatusOr<kernels::Tensor> WeightLoader::Matrix(std::span<const Part> parts) {
  int64_t out = 0;
  int64_t in = 0;
  for (const Part& part : parts) {
    out += part.split == Split::kRows ? shard_.Count(part.out) : part.out;
    in = part.split == Split::kColumns ? shard_.Count(part.in) : part.in;
  }
  KDT_ASSIGN_OR_RETURN(char* data, Allocate(out * in * kBf16Bytes));
  char* to = data;
  for (const Part& part : parts) {
    KDT_RETURN_IF_ERROR(CopyPart(part, to));
    const int64_t rows = part.split == Split::kRows ? shard_.Count(part.out) : part.out;
    if (to != nullptr) to += rows * in * kBf16Bytes;
  }
  return kernels::MakeTensor(data, kernels::DType::kBF16, out, in);
}

absl::StatusOr<kernels::Tensor> WeightLoader::ColumnRange(const std::string& name, int64_t out, int64_t in,
                                                          int64_t begin, int64_t count) {
  KDT_ASSIGN_OR_RETURN(const TensorView tensor, source_->Find(name, {DType::kBF16}, {out, in}));
  KDT_ASSIGN_OR_RETURN(char* data, Allocate(out * count * kBf16Bytes));
  Copy(tensor, 0, out, in * kBf16Bytes, begin * kBf16Bytes, count * kBf16Bytes, data);
  return kernels::MakeTensor(data, kernels::DType::kBF16, out, count);
}

absl::StatusOr<const uint16_t*> WeightLoader::Vector(const std::string& name, int64_t n) {
  KDT_ASSIGN_OR_RETURN(const TensorView tensor, source_->Find(name, {DType::kBF16}, {n}));
  KDT_ASSIGN_OR_RETURN(char* data, Allocate(n * kBf16Bytes));
  Copy(tensor, 0, 1, n * kBf16Bytes, 0, n * kBf16Bytes, data);
  return reinterpret_cast<const uint16_t*>(data);
}

absl::StatusOr<const float*> WeightLoader::FloatVector(const std::string& name, int64_t n) {
  KDT_ASSIGN_OR_RETURN(const TensorView tensor, source_->Find(name, {DType::kBF16, DType::kF32}, {n}));
  std::vector<float> values(n);
  if (tensor.dtype == DType::kBF16) {
    const auto bits = tensor.As<uint16_t>();
    std::transform(bits.begin(), bits.end(), values.begin(), Bf16ToFloat);
  } else {
    const auto floats = tensor.As<float>();
    std::copy(floats.begin(), floats.end(), values.begin());
  }
  return Constants(values);
}

absl::StatusOr<const float*> WeightLoader::Constants(std::span<const float> values) {
  KDT_ASSIGN_OR_RETURN(char* data, Allocate(values.size_bytes()));
  if (mode_ == Mode::kCopy) KDT_RETURN_IF_ERROR(backend_->Upload(data, values.data(), values.size_bytes()));
  bytes_ += values.size_bytes();
  constant_bytes_ += values.size_bytes();
  return reinterpret_cast<const float*>(data);
}

absl::Status WeightLoader::CopyInt4(const std::string& name, int64_t out, int64_t in, Split split,
                                    char* packed, char* scale) {
  KDT_ASSIGN_OR_RETURN(const Int4View view, source_->FindInt4(name, out, in));
  const int64_t words = in / kInt4PerWord;
  const int64_t groups = in / kernels::kInt4Group;
  const auto copy = [&](const TensorView& tensor, int64_t columns, int64_t size, char* to) {
    const bool rows = split == Split::kRows, cut = split == Split::kColumns;
    Copy(tensor, rows ? shard_.Begin(out) : 0, rows ? shard_.Count(out) : out, columns * size,
         cut ? shard_.Begin(columns) * size : 0, (cut ? shard_.Count(columns) : columns) * size, to);
  };
  copy(view.packed, words, kWordBytes, packed);
  copy(view.scale, groups, kBf16Bytes, scale);
  return absl::OkStatus();
}

absl::StatusOr<kernels::Int4Experts> WeightLoader::Experts(const std::string& prefix, int64_t experts,
                                                           int64_t hidden, int64_t inner,
                                                           MoeSharding sharding) {
  const bool whole = sharding == MoeSharding::kExpert;
  const int64_t first = whole ? shard_.Begin(experts) : 0;
  const int64_t count = whole ? shard_.Count(experts) : experts;
  const int64_t local = whole ? inner : shard_.Count(inner);
  // Bytes of one expert's matrices; gate and up have one shape, [local, hidden], down has [hidden, local].
  const int64_t packed_bytes = local * hidden / kInt4PerWord * kWordBytes;
  const int64_t scale_bytes = local * hidden / kernels::kInt4Group * kBf16Bytes;
  KDT_ASSIGN_OR_RETURN(char* gate_up, Allocate(count * 2 * packed_bytes));
  KDT_ASSIGN_OR_RETURN(char* gate_up_scale, Allocate(count * 2 * scale_bytes));
  KDT_ASSIGN_OR_RETURN(char* down, Allocate(count * packed_bytes));
  KDT_ASSIGN_OR_RETURN(char* down_scale, Allocate(count * scale_bytes));
  const auto at = [](char* base, int64_t offset) { return base == nullptr ? nullptr : base + offset; };
  const Split rows = whole ? Split::kNone : Split::kRows;
  const Split columns = whole ? Split::kNone : Split::kColumns;
  for (int64_t e = 0; e < count; ++e) {
    const std::string name = absl::StrCat(prefix, first + e, ".");
    KDT_RETURN_IF_ERROR(CopyInt4(name + "gate_proj", inner, hidden, rows, at(gate_up, 2 * e * packed_bytes),
                                 at(gate_up_scale, 2 * e * scale_bytes)));
    KDT_RETURN_IF_ERROR(CopyInt4(name + "up_proj", inner, hidden, rows,
                                 at(gate_up, (2 * e + 1) * packed_bytes),
                                 at(gate_up_scale, (2 * e + 1) * scale_bytes)));
    KDT_RETURN_IF_ERROR(CopyInt4(name + "down_proj", hidden, inner, columns, at(down, e * packed_bytes),
                                 at(down_scale, e * scale_bytes)));
  }
  kernels::Int4Experts result;
  result.experts = count;
  result.first_expert = first;
  result.hidden = hidden;
  result.inner = local;
  result.gate_up = reinterpret_cast<const uint32_t*>(gate_up);
  result.gate_up_scale = reinterpret_cast<const uint16_t*>(gate_up_scale);
  result.down = reinterpret_cast<const uint32_t*>(down);
  result.down_scale = reinterpret_cast<const uint16_t*>(down_scale);
  if (mode_ == Mode::kCopy) experts_.push_back(result);
  return result;
}

}  // namespace kdt
