// The memory behind a KV pool's slots: one pool [slots + 1, width] a layer, all in one buffer. Slot 0 is the
// padding slot.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/status.h"
#include "kdt/kernels/backend.h"

namespace kdt {

class KvStorage {
 public:
  static absl::StatusOr<KvStorage> Create(kernels::Backend& backend, int64_t layers, int64_t slots,
                                          int64_t width, kernels::DType dtype) {
    KvStorage storage;
    storage.layers_ = layers;
    storage.rows_ = slots + 1;
    storage.width_ = width;
    storage.dtype_ = dtype;
    KDT_ASSIGN_OR_RETURN(storage.buffer_,
                         kernels::Buffer::Make(backend, storage.rows_ * layers * storage.SlotBytes()));
    return storage;
  }

  const kernels::Buffer& buffer() const { return buffer_; }
  int64_t layers() const { return layers_; }
  int64_t layer_stride() const { return rows_ * width_; }                    // elements
  int64_t SlotBytes() const { return width_ * kernels::DTypeSize(dtype_); }  // of one slot in one layer
  kernels::Tensor Layer(int64_t layer) const {
    return kernels::MakeTensor(buffer_.as<char>() + layer * rows_ * SlotBytes(), dtype_, rows_, width_);
  }

 private:
  int64_t layers_ = 0;
  int64_t rows_ = 0;
  int64_t width_ = 0;
  kernels::DType dtype_ = kernels::DType::kF32;
  kernels::Buffer buffer_;
};

}  // namespace kdt
