// A GPU and a CPU backend side by side, matrices of bf16 values on both, and error measures. The tests pass,
// saying so, where there is no GPU: the CPU twins they compare with are tested everywhere.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "common/bf16.h"
#include "kdt/kernels/cuda_backend.h"
#include "tests/support/catch.h"

namespace kdt::kernels::test {

// The GPU of this machine, or nullptr.
inline Backend* Gpu() {
  static const std::unique_ptr<Backend> backend = [] {
    absl::StatusOr<std::unique_ptr<Backend>> made = MakeCudaBackend({});
    return made.ok() ? std::move(*made) : nullptr;
  }();
  return backend.get();
}
inline Backend& Cpu() {
  static const std::unique_ptr<Backend> backend = std::move(*MakeCpuBackend(2));
  return *backend;
}

#define KDT_NEED_GPU()                               \
  do {                                               \
    if (::kdt::kernels::test::Gpu() == nullptr) {    \
      WARN("no GPU of this build's kinds: skipped"); \
      return;                                        \
    }                                                \
  } while (false)

// Values on the GPU, with an owner.
template <typename T>
class OnGpu {
 public:
  explicit OnGpu(const std::vector<T>& host) : size_(host.size()) {
    absl::StatusOr<Buffer> made = Buffer::Make(*Gpu(), host.size() * sizeof(T) + 16);
    REQUIRE(made.ok());
    buffer_ = std::move(*made);
    Set(host);
  }
  OnGpu(size_t size, int fill_byte) : OnGpu(Filled(size, fill_byte)) {}

  void Set(const std::vector<T>& host) {
    REQUIRE(Gpu()->Upload(buffer_.data(), host.data(), host.size() * sizeof(T)).ok());
    REQUIRE(Gpu()->Synchronize().ok());
  }
  std::vector<T> Get() const {
    std::vector<T> host(size_);
    REQUIRE(Gpu()->Download(host.data(), buffer_.data(), size_ * sizeof(T)).ok());
    return host;
  }
  T* data() const { return buffer_.as<T>(); }

 private:
  static std::vector<T> Filled(size_t size, int byte) {
    std::vector<T> host(size);
    std::memset(host.data(), byte, size * sizeof(T));
    return host;
  }
  Buffer buffer_;
  size_t size_;
};

inline std::vector<uint16_t> ToBf16(const std::vector<float>& values) {
  std::vector<uint16_t> bits(values.size());
  for (size_t i = 0; i < values.size(); ++i) bits[i] = FloatToBf16(values[i]);
  return bits;
}
inline std::vector<float> ToFloat(const std::vector<uint16_t>& bits) {
  std::vector<float> values(bits.size());
  for (size_t i = 0; i < bits.size(); ++i) values[i] = Bf16ToFloat(bits[i]);
  return values;
}

// Normal values that bf16 holds exactly.
inline std::vector<float> Normal(std::mt19937& rng, size_t count, float scale = 1.0f) {
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(count);
  for (float& v : values) v = Bf16ToFloat(FloatToBf16(normal(rng)));
  return values;
}

// The same matrix for both backends: float32 on the CPU, bf16 on the GPU.
struct Twin {
  Twin(std::mt19937& rng, int64_t rows_in, int64_t cols_in, float scale = 1.0f)
      : Twin(Normal(rng, rows_in * cols_in, scale), rows_in, cols_in) {}
  Twin(std::vector<float> values, int64_t rows_in, int64_t cols_in)
      : rows(rows_in), cols(cols_in), host(std::move(values)), bits(ToBf16(host)), device(bits) {}

  Tensor cpu() { return MakeTensor(host.data(), DType::kF32, rows, cols); }
  Tensor cpu_bf16() { return MakeTensor(bits.data(), DType::kBF16, rows, cols); }
  Tensor gpu() { return MakeTensor(device.data(), DType::kBF16, rows, cols); }
  std::vector<float> FromGpu() const { return ToFloat(device.Get()); }

  int64_t rows, cols;
  std::vector<float> host;
  std::vector<uint16_t> bits;
  OnGpu<uint16_t> device;
};

// ||a - b|| / ||b||; NaN when either has one.
template <typename A, typename B>
double RelativeError(const std::vector<A>& a, const std::vector<B>& b) {
  REQUIRE(a.size() == b.size());
  double error = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    error += d * d;
    norm += static_cast<double>(b[i]) * static_cast<double>(b[i]);
  }
  return norm == 0 ? std::sqrt(error) : std::sqrt(error / norm);
}

}  // namespace kdt::kernels::test
