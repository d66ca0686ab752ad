// The CUDA ops over small shapes that take every path, with memory of its own for each array, for the tools
// of compute-sanitizer. A shape runs twice, first over memory that nothing was written to, then over memory
// full of a pattern: both runs must give the same bits, every output must be written and finite, and the
// counters that all ops share must be zeros again.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "kernels/cuda/ops.h"

namespace kdt::shapes {

// Ends the program: there is no one to hand an error to.
[[noreturn]] void Fail(const std::string& what);
void Check(cudaError_t error, const char* what);

struct Workspace {
  size_t bytes = size_t{16} << 20;
  bool zeroed = false;  // before the first run, for an op that reads values there which it then does not use
};

class Shapes {
 public:
  // With `kernels` nothing runs: the names of the kernels that would are collected.
  explicit Shapes(bool kernels);
  ~Shapes();

  // Device memory of the next Run, which frees it. All sizes are exact.
  template <typename T>
  const T* In(const std::vector<T>& host) {
    return static_cast<const T*>(Add(host.data(), host.size() * sizeof(T), Kind::kIn, Type::kBytes));
  }
  // Read and written: as given before both runs.
  template <typename T>
  T* InOut(const std::vector<T>& host) {
    return static_cast<T*>(Add(host.data(), host.size() * sizeof(T), Kind::kInOut, TypeOf(T{})));
  }
  // As given before both runs, and undefined behind the op.
  template <typename T>
  T* Spent(const std::vector<T>& host) {
    return static_cast<T*>(Add(host.data(), host.size() * sizeof(T), Kind::kSpent, Type::kBytes));
  }
  // Written whole.
  template <typename T>
  T* Out(int64_t count) {
    return static_cast<T*>(Add(nullptr, static_cast<size_t>(count) * sizeof(T), Kind::kOut, TypeOf(T{})));
  }
  // Undefined in front of the op and behind it.
  void* Scratch(int64_t bytes) {
    return Add(nullptr, static_cast<size_t>(bytes), Kind::kScratch, Type::kBytes);
  }

  void Run(const std::string& name, const std::function<cudaError_t(const cuda::Launch&)>& op,
           const Workspace& workspace = {});

  // A bf16 matrix of normal values and the like.
  kernels::Tensor Matrix(int64_t rows, int64_t cols, float scale = 1.0f);
  kernels::Tensor MatrixInOut(int64_t rows, int64_t cols, float scale = 1.0f);
  kernels::Tensor OutMatrix(int64_t rows, int64_t cols);
  kernels::Tensor OutFloats(int64_t rows, int64_t cols);
  std::vector<uint16_t> Bf16(int64_t count, float scale = 1.0f);
  std::vector<float> Floats(int64_t count, float scale = 1.0f);
  // 0 .. count - 1 in any order.
  std::vector<int32_t> Order(int64_t count);
  uint32_t Random();

  int shapes() const { return shapes_; }
  int failures() const { return failures_; }
  const std::set<std::string>& kernels() const { return names_; }

 private:
  enum class Kind { kIn, kInOut, kSpent, kOut, kScratch };
  static bool IsResult(Kind kind) { return kind == Kind::kInOut || kind == Kind::kOut; }
  enum class Type { kBytes, kF32, kBF16 };
  struct Array {
    char* data;
    size_t bytes;
    Kind kind;
    Type type;
    std::vector<char> host, first;  // what goes in; what the first run gave
  };
  static Type TypeOf(float) { return Type::kF32; }
  static Type TypeOf(uint16_t) { return Type::kBF16; }
  template <typename T>
  static Type TypeOf(T) {
    return Type::kBytes;
  }
  void* Add(const void* host, size_t bytes, Kind kind, Type type);
  void Collect(const std::function<cudaError_t(const cuda::Launch&)>& op);
  std::string Verdict();
  std::string Counters() const;
  void Free();

  const bool collecting_;
  cuda::Launch launch_{};
  std::vector<Array> arrays_;
  uint64_t state_ = 1;
  int shapes_ = 0, failures_ = 0;
  std::set<std::string> names_;
};

// An op, or a group of small ones, by the name that --op takes.
struct Op {
  const char* name;
  void (*run)(Shapes&);
};
std::vector<Op> AttentionOps();
std::vector<Op> MatrixOps();
std::vector<Op> MoeOps();
std::vector<Op> SmallOps();

}  // namespace kdt::shapes
