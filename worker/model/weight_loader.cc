#include "worker/model/weight_loader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/int4.h"
#include "common/status.h"

namespace kdt {
namespace {

// Copied between two DropPages, so that resident memory stays near the shard's own size.
constexpr int64_t kCopyChunkBytes = 8 << 20;
constexpr int64_t kBf16Bytes = 2;
constexpr int64_t kWordBytes = 4;

}  // namespace

absl::StatusOr<char*> WeightLoader::Allocate(uint64_t bytes) {
  if (mode_ == Mode::kPlan) return nullptr;
  KDT_ASSIGN_OR_RETURN(kernels::Buffer buffer, kernels::Buffer::Make(*backend_, bytes));
  buffers_.push_back(std::move(buffer));
  return buffers_.back().as<char>();
}

void WeightLoader::Count(uint64_t bytes) {
  bytes_ += bytes;
  if (mode_ == Mode::kCopy && progress_) progress_(bytes_, total_);
}

absl::Status WeightLoader::Copy(const TensorView& tensor, int64_t row_begin, int64_t rows,
                                int64_t source_row_bytes, int64_t byte_begin, int64_t row_bytes, char* to) {
  if (mode_ == Mode::kPlan) {
    Count(rows * row_bytes);
    return absl::OkStatus();
  }
  const int64_t chunk_rows = std::max<int64_t>(1, kCopyChunkBytes / source_row_bytes);
  for (int64_t row = 0; row < rows; row += chunk_rows) {
    const int64_t count = std::min(chunk_rows, rows - row);
    const auto source = tensor.bytes.subspan((row_begin + row) * source_row_bytes, count * source_row_bytes);
    if (row_bytes == source_row_bytes) {
      KDT_RETURN_IF_ERROR(backend_->Upload(to, source.data(), count * row_bytes));
    } else {
      staging_.resize(count * row_bytes);
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(staging_.data() + i * row_bytes, source.data() + i * source_row_bytes + byte_begin,
                    row_bytes);
      }
      KDT_RETURN_IF_ERROR(backend_->Upload(to, staging_.data(), staging_.size()));
    }
    checkpoint_->DropPages(tensor, source);
    to += count * row_bytes;
    Count(count * row_bytes);
  }
  return absl::OkStatus();
}

absl::Status WeightLoader::CopyPart(const Part& part, char* to) {
  KDT_ASSIGN_OR_RETURN(const TensorView tensor,
                       checkpoint_->Find(part.name, DType::kBF16, {part.out, part.in}));
  const bool rows = part.split == Split::kRows;
  const bool columns = part.split == Split::kColumns;
  return Copy(tensor, rows ? shard_.Begin(part.out) : 0, rows ? shard_.Count(part.out) : part.out,
              part.in * kBf16Bytes, columns ? shard_.Begin(part.in) * kBf16Bytes : 0,
              (columns ? shard_.Count(part.in) : part.in) * kBf16Bytes, to);
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
  KDT_ASSIGN_OR_RETURN(const TensorView tensor, checkpoint_->Find(name, DType::kBF16, {out, in}));
  KDT_ASSIGN_OR_RETURN(char* data, Allocate(out * count * kBf16Bytes));
  KDT_RETURN_IF_ERROR(Copy(tensor, 0, out, in * kBf16Bytes, begin * kBf16Bytes, count * kBf16Bytes, data));
  return kernels::MakeTensor(data, kernels::DType::kBF16, out, count);
}

absl::StatusOr<const uint16_t*> WeightLoader::Vector(const std::string& name, int64_t n) {
  KDT_ASSIGN_OR_RETURN(const TensorView tensor, checkpoint_->Find(name, DType::kBF16, {n}));
  KDT_ASSIGN_OR_RETURN(char* data, Allocate(n * kBf16Bytes));
  KDT_RETURN_IF_ERROR(Copy(tensor, 0, 1, n * kBf16Bytes, 0, n * kBf16Bytes, data));
  return reinterpret_cast<const uint16_t*>(data);
}

absl::StatusOr<const float*> WeightLoader::FloatVector(const std::string& name, int64_t n) {
  KDT_ASSIGN_OR_RETURN(TensorView tensor, checkpoint_->Find(name));
  std::vector<float> values(n);
  if (tensor.dtype == DType::kBF16) {
    KDT_RETURN_IF_ERROR(Expect(tensor, DType::kBF16, std::vector<int64_t>{n}));
    const auto bits = tensor.As<uint16_t>();
    std::transform(bits.begin(), bits.end(), values.begin(), Bf16ToFloat);
  } else {
    KDT_RETURN_IF_ERROR(Expect(tensor, DType::kF32, std::vector<int64_t>{n}));
    const auto floats = tensor.As<float>();
    std::copy(floats.begin(), floats.end(), values.begin());
  }
  return Constants(values);
}

absl::StatusOr<const float*> WeightLoader::Constants(std::span<const float> values) {
  KDT_ASSIGN_OR_RETURN(char* data, Allocate(values.size_bytes()));
  if (mode_ == Mode::kCopy) KDT_RETURN_IF_ERROR(backend_->Upload(data, values.data(), values.size_bytes()));
  Count(values.size_bytes());
  return reinterpret_cast<const float*>(data);
}

absl::Status WeightLoader::CopyInt4(const std::string& name, int64_t out, int64_t in, Split split,
                                    char* packed, char* scale) {
  const int64_t words = in / kInt4PerWord;
  const int64_t groups = in / kernels::kInt4Group;
  KDT_ASSIGN_OR_RETURN(const TensorView shape, checkpoint_->Find(name + ".weight_shape", DType::kI32, {2}));
  const auto extents = shape.As<int32_t>();
  if (extents[0] != out || extents[1] != in) {
    return absl::InvalidArgumentError(absl::StrCat(shape.name, " is [", extents[0], ", ", extents[1],
                                                   "], but the config asks for [", out, ", ", in, "]"));
  }
  KDT_ASSIGN_OR_RETURN(const TensorView q,
                       checkpoint_->Find(name + ".weight_packed", DType::kI32, {out, words}));
  KDT_ASSIGN_OR_RETURN(const TensorView s,
                       checkpoint_->Find(name + ".weight_scale", DType::kBF16, {out, groups}));
  if (split == Split::kRows) {
    const int64_t begin = shard_.Begin(out);
    const int64_t rows = shard_.Count(out);
    KDT_RETURN_IF_ERROR(Copy(q, begin, rows, words * kWordBytes, 0, words * kWordBytes, packed));
    return Copy(s, begin, rows, groups * kBf16Bytes, 0, groups * kBf16Bytes, scale);
  }
  KDT_RETURN_IF_ERROR(Copy(q, 0, out, words * kWordBytes, shard_.Begin(words) * kWordBytes,
                           shard_.Count(words) * kWordBytes, packed));
  return Copy(s, 0, out, groups * kBf16Bytes, shard_.Begin(groups) * kBf16Bytes,
              shard_.Count(groups) * kBf16Bytes, scale);
}

absl::StatusOr<kernels::Int4Experts> WeightLoader::Experts(const std::string& prefix, int64_t experts,
                                                           int64_t hidden, int64_t inner) {
  const int64_t local = shard_.Count(inner);
  // Bytes of one expert's matrices; gate and up have one shape, [local, hidden], down has [hidden, local].
  const int64_t packed_bytes = local * hidden / kInt4PerWord * kWordBytes;
  const int64_t scale_bytes = local * hidden / kernels::kInt4Group * kBf16Bytes;
  KDT_ASSIGN_OR_RETURN(char* gate_up, Allocate(experts * 2 * packed_bytes));
  KDT_ASSIGN_OR_RETURN(char* gate_up_scale, Allocate(experts * 2 * scale_bytes));
  KDT_ASSIGN_OR_RETURN(char* down, Allocate(experts * packed_bytes));
  KDT_ASSIGN_OR_RETURN(char* down_scale, Allocate(experts * scale_bytes));
  const auto at = [](char* base, int64_t offset) { return base == nullptr ? nullptr : base + offset; };
  for (int64_t e = 0; e < experts; ++e) {
    const std::string name = absl::StrCat(prefix, e, ".");
    KDT_RETURN_IF_ERROR(CopyInt4(name + "gate_proj", inner, hidden, Split::kRows,
                                 at(gate_up, 2 * e * packed_bytes), at(gate_up_scale, 2 * e * scale_bytes)));
    KDT_RETURN_IF_ERROR(CopyInt4(name + "up_proj", inner, hidden, Split::kRows,
                                 at(gate_up, (2 * e + 1) * packed_bytes),
                                 at(gate_up_scale, (2 * e + 1) * scale_bytes)));
    KDT_RETURN_IF_ERROR(CopyInt4(name + "down_proj", hidden, inner, Split::kColumns,
                                 at(down, e * packed_bytes), at(down_scale, e * scale_bytes)));
  }
  kernels::Int4Experts result;
  result.experts = experts;
  result.hidden = hidden;
  result.inner = local;
  result.gate_up = reinterpret_cast<const uint32_t*>(gate_up);
  result.gate_up_scale = reinterpret_cast<const uint16_t*>(gate_up_scale);
  result.down = reinterpret_cast<const uint32_t*>(down);
  result.down_scale = reinterpret_cast<const uint16_t*>(down_scale);
  return result;
}

}  // namespace kdt
