// Random matrices, bf16 rounding and backends with 1, 2 and 3 threads for the tests of the CPU ops.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "common/bf16.h"
#include "kdt/kernels/backend.h"
#include "tests/support/catch.h"

namespace kdt::kernels::test {

inline std::unique_ptr<Backend> MakeBackend(int threads = 1) {
  absl::StatusOr<std::unique_ptr<Backend>> backend = MakeCpuBackend(threads);
  REQUIRE(backend.ok());
  return std::move(*backend);
}

// A matrix with an owner. Rows may lie further apart than they are wide; the gap holds a pattern that no op
// may touch.
struct Matrix {
  static constexpr float kGap = -12345.0f;

  Matrix(int64_t rows_in, int64_t cols_in, int64_t gap = 0)
      : rows(rows_in), cols(cols_in), stride(cols_in + gap), values(rows_in * (cols_in + gap), kGap) {}

  float* row(int64_t r) { return values.data() + r * stride; }
  const float* row(int64_t r) const { return values.data() + r * stride; }
  float& at(int64_t r, int64_t c) { return row(r)[c]; }
  float at(int64_t r, int64_t c) const { return row(r)[c]; }
  Tensor tensor() { return {values.data(), DType::kF32, rows, cols, stride}; }

  Matrix& Fill(std::mt19937& rng, float scale = 1.0f) {
    std::normal_distribution<float> normal(0.0f, scale);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) at(r, c) = normal(rng);
    }
    return *this;
  }
  bool GapsUntouched() const {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = cols; c < stride; ++c) {
        if (row(r)[c] != kGap) return false;
      }
    }
    return true;
  }

  int64_t rows, cols, stride;
  std::vector<float> values;
};

// bf16 weights.
struct Bf16Matrix {
  Bf16Matrix(int64_t rows_in, int64_t cols_in) : rows(rows_in), cols(cols_in), bits(rows_in * cols_in) {}

  float at(int64_t r, int64_t c) const { return Bf16ToFloat(bits[r * cols + c]); }
  Tensor tensor() { return MakeTensor(bits.data(), DType::kBF16, rows, cols); }
  Bf16Matrix& Fill(std::mt19937& rng, float scale = 1.0f) {
    std::normal_distribution<float> normal(0.0f, scale);
    for (uint16_t& value : bits) value = FloatToBf16(normal(rng));
    return *this;
  }

  int64_t rows, cols;
  std::vector<uint16_t> bits;
};

inline bool SameBits(const float* a, const float* b, int64_t count) {
  return std::memcmp(a, b, count * sizeof(float)) == 0;
}

inline bool SameBits(const Matrix& a, const Matrix& b) {
  if (a.rows != b.rows || a.cols != b.cols) return false;
  for (int64_t r = 0; r < a.rows; ++r) {
    if (!SameBits(a.row(r), b.row(r), a.cols)) return false;
  }
  return true;
}

}  // namespace kdt::kernels::test
