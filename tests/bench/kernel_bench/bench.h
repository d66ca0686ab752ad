// What the op benchmarks share: device memory, cold-cache timing, result rows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "kernels/cuda/ops.h"

namespace kdt::bench {

// A benchmark has no one to hand an error to.
#define KDT_BENCH_CUDA(call)                                                                            \
  do {                                                                                                  \
    if (const cudaError_t error_ = (call); error_ != cudaSuccess) {                                     \
      std::fprintf(stderr, "%s: %s at %s:%d\n", #call, cudaGetErrorString(error_), __FILE__, __LINE__); \
      std::exit(1);                                                                                     \
    }                                                                                                   \
  } while (false)

struct Rates {
  double read = 0;  // bytes a second
  double mma = 0;   // FLOP a second
};

// The least time in which a kernel that only reads a row's bytes takes its place in the same chain, and which
// of the ways to read that was (read_floor.h). No microseconds: not measured.
struct ReadTime {
  double microseconds = 0;
  std::string way;
};
struct ReadTimes {
  ReadTime read, dependent, dependent_twice;
};

struct Row {
  std::string op, shape;
  double microseconds;       // median
  double bytes, flop;        // that the op must move and do at least
  double roof_microseconds;  // the larger of bytes over the read rate and flop over the mma rate
  ReadTimes floor = {};
};

class Bench {
 public:
  Bench(int repeats);

  // Device memory that lives until the end of the program.
  void* Memory(size_t bytes) const;
  template <typename T>
  T* Copy(const std::vector<T>& host) const {
    void* data = Memory(host.size() * sizeof(T) + 16);
    KDT_BENCH_CUDA(cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    return static_cast<T*>(data);
  }

  // Median of run(0), run(1), ...: each call should use memory that the last ones have not touched.
  double Median(const std::function<cudaError_t(int)>& run) const;
  // Microseconds of one of `count` runs in a captured graph, where each is a programmatic dependent of the
  // one before; median of a few replays.
  double Chain(int count, const std::function<cudaError_t(int)>& run) const;
  void Report(Row row);
  void WriteJson(const std::string& path, const std::string& device) const;

  const Rates& rates() const { return rates_; }
  const cuda::Launch& launch() const { return launch_; }

 private:
  int repeats_;
  cuda::Launch launch_{};
  Rates rates_;
  std::vector<Row> rows_;
};

void BenchVerifyAttention(Bench& bench);
void BenchMoe(Bench& bench);
void BenchMoeSharding(Bench& bench);
void BenchGemm(Bench& bench);
void BenchSmallOps(Bench& bench);
void BenchLayer(Bench& bench, int context);  // committed tokens
void BenchFragmentation(Bench& bench);

}  // namespace kdt::bench
