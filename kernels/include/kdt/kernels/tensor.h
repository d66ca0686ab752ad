// Views of matrices in a backend's memory. They own nothing.
#pragma once

#include <cstdint>

namespace kdt::kernels {

enum class DType : uint8_t { kF32, kBF16 };

constexpr int64_t DTypeSize(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

// Row-major [rows, cols]; consecutive rows are `stride` elements apart (stride >= cols).
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;

  // Columns [begin, begin + count) of every row.
  Tensor Columns(int64_t begin, int64_t count) const {
    return {static_cast<char*>(data) + begin * DTypeSize(dtype), dtype, rows, count, stride};
  }
  // Rows [begin, begin + count).
  Tensor Rows(int64_t begin, int64_t count) const {
    return {static_cast<char*>(data) + begin * stride * DTypeSize(dtype), dtype, count, cols, stride};
  }
  float* f32() const { return static_cast<float*>(data); }
  uint16_t* bf16() const { return static_cast<uint16_t*>(data); }  // raw bits
};

inline Tensor MakeTensor(void* data, DType dtype, int64_t rows, int64_t cols) {
  return {data, dtype, rows, cols, cols};
}

}  // namespace kdt::kernels
