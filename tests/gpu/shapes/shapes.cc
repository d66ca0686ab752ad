#include "tests/gpu/shapes/shapes.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "common/bf16.h"
#include "kernels/cuda/graph_kernels.h"

namespace kdt::shapes {
namespace {

// What memory holds before the second run: NaN as float32 and as bf16.
constexpr int kPattern = 0xff;

bool Finite(const std::vector<char>& bytes, bool f32) {
  for (size_t i = 0; i < bytes.size(); i += f32 ? 4 : 2) {
    float value = 0;
    uint16_t half = 0;
    if (f32) {
      std::memcpy(&value, bytes.data() + i, sizeof(value));
    } else {
      std::memcpy(&half, bytes.data() + i, sizeof(half));
      value = Bf16ToFloat(half);
    }
    if (!std::isfinite(value)) return false;
  }
  return true;
}

}  // namespace

void Fail(const std::string& what) {
  std::fprintf(stderr, "kernel_shapes: %s\n", what.c_str());
  std::exit(1);
}
void Check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) Fail(std::string(what) + ": " + cudaGetErrorString(error));
}

Shapes::Shapes(bool kernels) : collecting_(kernels) {
  cudaDeviceProp properties;
  Check(cudaGetDeviceProperties(&properties, 0), "properties of the device");
  Check(cudaStreamCreate(&launch_.stream), "a stream");
  launch_.processors = properties.multiProcessorCount;
  void* counters = nullptr;
  Check(cudaMalloc(&counters, cuda::kAllCounters * sizeof(unsigned)), "counters");
  Check(cudaMemset(counters, 0, cuda::kAllCounters * sizeof(unsigned)), "counters");
  launch_.counters = static_cast<unsigned*>(counters);
}

Shapes::~Shapes() {
  cudaFree(launch_.counters);
  cudaStreamDestroy(launch_.stream);
}

void* Shapes::Add(const void* host, size_t bytes, Kind kind, Type type) {
  Array array{nullptr, bytes, kind, type, {}, {}};
  void* data = nullptr;
  Check(cudaMalloc(&data, std::max<size_t>(bytes, 1)), "device memory");
  array.data = static_cast<char*>(data);
  if (host != nullptr) {
    array.host.assign(static_cast<const char*>(host), static_cast<const char*>(host) + bytes);
    Check(cudaMemcpy(array.data, host, bytes, cudaMemcpyHostToDevice), "an input");
  }
  arrays_.push_back(std::move(array));
  return data;
}

void Shapes::Free() {
  for (const Array& array : arrays_) Check(cudaFree(array.data), "freeing");
  arrays_.clear();
  Check(cudaFree(launch_.workspace), "freeing");
}

// Nothing, or what is wrong with the second run's results.
std::string Shapes::Verdict() {
  for (size_t i = 0; i < arrays_.size(); ++i) {
    const Array& array = arrays_[i];
    if (!IsResult(array.kind)) continue;
    std::vector<char> now(array.bytes);
    Check(cudaMemcpy(now.data(), array.data, array.bytes, cudaMemcpyDeviceToHost), "an output");
    const std::string which = "array " + std::to_string(i);
    if (now != array.first) return which + " differs between two runs";
    if (array.type != Type::kBytes && !Finite(now, array.type == Type::kF32)) return which + " is not finite";
    if (array.kind == Kind::kInOut && now == array.host) return which + " was not changed";
    if (array.kind == Kind::kOut && array.type == Type::kBytes &&
        std::all_of(now.begin(), now.end(), [](char c) { return c == static_cast<char>(kPattern); }))
      return which + " was not written";
  }
  return "";
}

std::string Shapes::Counters() const {
  std::vector<unsigned> counters(cuda::kCounters);
  Check(cudaMemcpy(counters.data(), launch_.counters, counters.size() * sizeof(unsigned),
                   cudaMemcpyDeviceToHost),
        "counters");
  const bool zeros = std::all_of(counters.begin(), counters.end(), [](unsigned c) { return c == 0; });
  return zeros ? "" : "counters are left behind that are not zero";
}

void Shapes::Run(const std::string& name, const std::function<cudaError_t(const cuda::Launch&)>& op,
                 const Workspace& workspace) {
  Check(cudaMalloc(&launch_.workspace, workspace.bytes), "workspace");
  launch_.workspace_bytes = workspace.bytes;
  if (workspace.zeroed) Check(cudaMemset(launch_.workspace, 0, workspace.bytes), "workspace");
  ++shapes_;
  if (collecting_) {
    Collect(op);
    return Free();
  }
  std::string wrong;
  for (int run = 0; run < 2 && wrong.empty(); ++run) {
    if (run == 1) Check(cudaMemset(launch_.workspace, kPattern, workspace.bytes), "the pattern");
    for (const Array& array : arrays_) {
      if (array.kind == Kind::kInOut || array.kind == Kind::kSpent)
        Check(cudaMemcpy(array.data, array.host.data(), array.bytes, cudaMemcpyHostToDevice), "an input");
      if (run == 1 && (array.kind == Kind::kOut || array.kind == Kind::kScratch))
        Check(cudaMemset(array.data, kPattern, array.bytes), "the pattern");
    }
    Check(cudaDeviceSynchronize(), "inputs");
    if (const cudaError_t error = op(launch_); error != cudaSuccess) {
      wrong = cudaGetErrorString(error);
      break;
    }
    Check(cudaStreamSynchronize(launch_.stream), name.c_str());
    if (run == 0) {
      for (Array& array : arrays_) {
        if (!IsResult(array.kind)) continue;
        array.first.resize(array.bytes);
        Check(cudaMemcpy(array.first.data(), array.data, array.bytes, cudaMemcpyDeviceToHost), "an output");
      }
    } else {
      wrong = Verdict();
    }
    if (wrong.empty()) wrong = Counters();
  }
  std::printf("%-58s %s\n", name.c_str(), wrong.empty() ? "ok" : wrong.c_str());
  std::fflush(stdout);
  failures_ += !wrong.empty();
  Free();
}

// Captured, not run.
void Shapes::Collect(const std::function<cudaError_t(const cuda::Launch&)>& op) {
  cudaGraph_t graph = nullptr;
  Check(cudaStreamBeginCapture(launch_.stream, cudaStreamCaptureModeThreadLocal), "capture");
  Check(op(launch_), "capture");
  Check(cudaStreamEndCapture(launch_.stream, &graph), "capture");
  const auto kernels = cuda::KernelsOf(graph);
  if (!kernels.has_value()) Fail("the driver does not tell a graph's kernels");
  for (const cuda::GraphKernel& kernel : *kernels) {
    if (kernel.name.empty()) Fail("a kernel of a graph is unknown");
    names_.insert(kernel.name);
  }
  Check(cudaGraphDestroy(graph), "capture");
}

uint32_t Shapes::Random() {
  state_ = state_ * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(state_ >> 33);
}

std::vector<float> Shapes::Floats(int64_t count, float scale) {
  std::vector<float> values(static_cast<size_t>(count));
  // The sum of four uniform values is near enough to normal.
  for (float& v : values) {
    float sum = -2.0f;
    for (int i = 0; i < 4; ++i) sum += static_cast<float>(Random() >> 7) * 0x1p-24f;
    v = sum * 1.7f * scale;
  }
  return values;
}

std::vector<uint16_t> Shapes::Bf16(int64_t count, float scale) {
  const std::vector<float> values = Floats(count, scale);
  std::vector<uint16_t> bits(values.size());
  std::transform(values.begin(), values.end(), bits.begin(), FloatToBf16);
  return bits;
}

std::vector<int32_t> Shapes::Order(int64_t count) {
  std::vector<int32_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[Random() % i]);
  return order;
}

kernels::Tensor Shapes::Matrix(int64_t rows, int64_t cols, float scale) {
  return kernels::MakeTensor(const_cast<uint16_t*>(In(Bf16(rows * cols, scale))), kernels::DType::kBF16, rows,
                             cols);
}
kernels::Tensor Shapes::MatrixInOut(int64_t rows, int64_t cols, float scale) {
  return kernels::MakeTensor(InOut(Bf16(rows * cols, scale)), kernels::DType::kBF16, rows, cols);
}
kernels::Tensor Shapes::OutMatrix(int64_t rows, int64_t cols) {
  return kernels::MakeTensor(Out<uint16_t>(rows * cols), kernels::DType::kBF16, rows, cols);
}
kernels::Tensor Shapes::OutFloats(int64_t rows, int64_t cols) {
  return kernels::MakeTensor(Out<float>(rows * cols), kernels::DType::kF32, rows, cols);
}

}  // namespace kdt::shapes
