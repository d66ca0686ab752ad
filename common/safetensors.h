// Reading of safetensors checkpoints through mmap. Files come from outside: everything in a header is checked
// before use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kdt {

enum class DType : uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E4M3,
  kF8E5M2,
  kU16,
  kI16,
  kF16,
  kBF16,
  kU32,
  kI32,
  kF32,
  kU64,
  kI64,
  kF64
};

size_t DTypeSize(DType dtype);             // bytes
absl::string_view DTypeName(DType dtype);  // as in the file: "BF16", "I32", ...

// A tensor in a mapped file; valid as long as the file (or checkpoint) that gave it lives.
struct TensorView {
  std::string name;
  DType dtype = DType::kU8;
  std::vector<int64_t> shape;        // row-major
  std::span<const std::byte> bytes;  // product(shape) * DTypeSize(dtype), aligned to the dtype's size

  // The elements as T; the caller has checked dtype (Expect) before.
  template <typename T>
  std::span<const T> As() const {
    return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
  }
};

// INVALID_ARGUMENT naming the tensor unless dtype and shape are these.
absl::Status Expect(const TensorView& tensor, DType dtype, std::span<const int64_t> shape);

// One mapped file. Checked on opening: header at most 100 MB and valid JSON without duplicate names; dtypes
// known; shape x dtype size = offsets' difference; tensors lie in the file one after the other without
// overlap, hole or rest.
class SafetensorsFile {
 public:
  static absl::StatusOr<std::unique_ptr<SafetensorsFile>> Open(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::string& path() const { return path_; }
  const std::map<std::string, TensorView, std::less<>>& tensors() const { return tensors_; }
  // NOT_FOUND names tensor and file.
  absl::StatusOr<TensorView> Find(absl::string_view name) const;
  // Tells the kernel that the pages wholly inside `bytes` (a part of a tensor's span) are not needed any
  // more: they leave this process's resident memory. Reading them again is allowed and reads the file again.
  void DropPages(std::span<const std::byte> bytes) const;

 private:
  SafetensorsFile() = default;
  std::string path_;
  const std::byte* base_ = nullptr;
  size_t size_ = 0;
  std::map<std::string, TensorView, std::less<>> tensors_;
};

// A checkpoint folder: model.safetensors.index.json with its shards, or a single model.safetensors. With an
// index the shards hold exactly the tensors that it lists. A missing or truncated shard is an error that
// names the file.
class Checkpoint {
 public:
  static absl::StatusOr<Checkpoint> Open(const std::string& folder);

  const std::string& folder() const { return folder_; }
  bool Contains(absl::string_view name) const;
  absl::StatusOr<TensorView> Find(absl::string_view name) const;
  // The same with dtype and shape checked.
  absl::StatusOr<TensorView> Find(absl::string_view name, DType dtype, std::span<const int64_t> shape) const;
  absl::StatusOr<TensorView> Find(absl::string_view name, DType dtype,
                                  std::initializer_list<int64_t> shape) const {
    return Find(name, dtype, std::span<const int64_t>(shape.begin(), shape.size()));
  }
  void DropPages(const TensorView& tensor, std::span<const std::byte> bytes) const;
  void DropPages(const TensorView& tensor) const { DropPages(tensor, tensor.bytes); }

  size_t tensor_count() const { return where_.size(); }
  uint64_t total_bytes() const { return total_bytes_; }  // of all tensors
  // 64-bit hash of the text of config.json and of all names, dtypes, shapes and sizes; not of the weights. 16
  // hex digits.
  std::string Digest() const;

 private:
  std::string folder_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, size_t, std::less<>> where_;  // tensor name -> index into files_
  uint64_t total_bytes_ = 0;
  std::string config_text_;
};

}  // namespace kdt
