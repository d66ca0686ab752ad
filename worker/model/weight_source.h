// Where weights come from: a checkpoint, or (for benchmarks) a generator.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/safetensors.h"

namespace kdt {

// An INT4 matrix [out, in] as it is stored: eight values an int32, a bf16 scale a group.
struct Int4View {
  TensorView packed;  // [out, in / 8]
  TensorView scale;   // [out, in / 32]
};

class WeightSource {
 public:
  virtual ~WeightSource() = default;

  virtual std::string name() const = 0;    // for error texts
  virtual std::string Digest() const = 0;  // 16 hex digits
  virtual bool Contains(absl::string_view name) const = 0;
  // INVALID_ARGUMENT when it holds other than `expected` tensors: parts that nothing would read.
  virtual absl::Status CheckTensorCount(size_t expected, absl::string_view what) const = 0;

  // The views stay valid as long as the source. NOT_FOUND, or INVALID_ARGUMENT naming the tensor whose dtype
  // is none of `dtypes` or whose shape is another.
  virtual absl::StatusOr<TensorView> Find(absl::string_view name, std::initializer_list<DType> dtypes,
                                          std::initializer_list<int64_t> shape) const = 0;
  // `name`.weight_{packed,scale,shape}.
  virtual absl::StatusOr<Int4View> FindInt4(absl::string_view name, int64_t out, int64_t in) const = 0;

  // A part of a tensor has been copied and is not needed soon. From any thread.
  virtual void Release(const TensorView& tensor, std::span<const std::byte> bytes) const = 0;
};

// A safetensors checkpoint folder. Pages that have been copied leave the process's memory.
absl::StatusOr<std::unique_ptr<WeightSource>> OpenCheckpointSource(const std::string& folder);

}  // namespace kdt
