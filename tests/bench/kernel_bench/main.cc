// kdt-kernel-bench [--op verify_attention|moe|moe_sharding|gemm|small|layer|fragmentation] [--repeats N]
// [--context N] [--json FILE]: times the CUDA ops over their shapes with cold caches. A result is the median
// of single runs between two events, queued behind a delay so that launches overlap nothing. Beside each time
// stand the bytes and FLOP the op cannot avoid and the roof they give at the rates measured first.
#include <algorithm>
#include <fstream>

#include "tests/bench/kernel_bench/bench.h"
#include "tests/bench/kernel_bench/device.h"

namespace kdt::bench {
namespace {

// Those that were measured.
template <typename F>
void ForEachFloor(const ReadTimes& floor, const F& f) {
  if (floor.read.microseconds > 0) f("read", floor.read);
  if (floor.dependent.microseconds > 0) f("dependent", floor.dependent);
  if (floor.dependent_twice.microseconds > 0) f("dependent_twice", floor.dependent_twice);
}

std::string FloorJson(const ReadTimes& floor) {
  std::string json;
  ForEachFloor(floor, [&](const char* name, const ReadTime& time) {
    json += std::string(", \"floor_") + name + "_us\": " + std::to_string(time.microseconds) + ", \"floor_" +
            name + "_way\": \"" + time.way + "\"";
  });
  return json;
}

}  // namespace

Bench::Bench(int repeats) : repeats_(repeats) {
  cudaDeviceProp properties;
  KDT_BENCH_CUDA(cudaGetDeviceProperties(&properties, 0));
  KDT_BENCH_CUDA(cudaStreamCreate(&launch_.stream));
  launch_.processors = properties.multiProcessorCount;
  launch_.workspace_bytes = size_t{512} << 20;
  launch_.workspace = Memory(launch_.workspace_bytes);
  launch_.counters = static_cast<unsigned*>(Memory(cuda::kAllCounters * sizeof(unsigned)));
  KDT_BENCH_CUDA(cudaMemset(launch_.counters, 0, cuda::kAllCounters * sizeof(unsigned)));
  const size_t bytes = size_t{2} << 30;
  void* data = Memory(bytes);
  FillBits(launch_.stream, data, bytes / 4, 1);
  auto* sink = static_cast<float*>(Memory(4));
  rates_.read = static_cast<double>(bytes) / Median([&](int) {
                  ReadAll(launch_.stream, data, bytes, sink);
                  return cudaGetLastError();
                }) *
                1e6;
  double flop = 0;
  const double mma = Median([&](int) {
    flop = MmaAll(launch_.stream, launch_.processors, 400, sink);
    return cudaGetLastError();
  });
  rates_.mma = flop / mma * 1e6;
  KDT_BENCH_CUDA(cudaFree(data));
  std::printf("%s: read %.2f TB/s, mma.sync %.0f TFLOP/s\n", properties.name, rates_.read * 1e-12,
              rates_.mma * 1e-12);
}

void* Bench::Memory(size_t bytes) const {
  void* data = nullptr;
  KDT_BENCH_CUDA(cudaMalloc(&data, bytes));
  return data;
}

double Bench::Median(const std::function<cudaError_t(int)>& run) const {
  std::vector<cudaEvent_t> begin(repeats_), end(repeats_);
  for (int i = 0; i < repeats_; ++i) {
    KDT_BENCH_CUDA(cudaEventCreate(&begin[i]));
    KDT_BENCH_CUDA(cudaEventCreate(&end[i]));
  }
  for (int i = 0; i < 2; ++i) KDT_BENCH_CUDA(run(i));
  Delay(launch_.stream, 200000);
  for (int i = 0; i < repeats_; ++i) {
    Delay(launch_.stream, 10000);
    KDT_BENCH_CUDA(cudaEventRecord(begin[i], launch_.stream));
    KDT_BENCH_CUDA(run(2 + i));
    KDT_BENCH_CUDA(cudaEventRecord(end[i], launch_.stream));
  }
  KDT_BENCH_CUDA(cudaStreamSynchronize(launch_.stream));
  std::vector<float> times(repeats_);
  for (int i = 0; i < repeats_; ++i) {
    KDT_BENCH_CUDA(cudaEventElapsedTime(&times[i], begin[i], end[i]));
    KDT_BENCH_CUDA(cudaEventDestroy(begin[i]));
    KDT_BENCH_CUDA(cudaEventDestroy(end[i]));
  }
  std::sort(times.begin(), times.end());
  return times[repeats_ / 2] * 1e3;
}

double Bench::Chain(int count, const std::function<cudaError_t(int)>& run) const {
  cudaGraph_t graph;
  cudaGraphExec_t ready;
  KDT_BENCH_CUDA(run(0));
  KDT_BENCH_CUDA(cudaStreamBeginCapture(launch_.stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < count; ++i) KDT_BENCH_CUDA(run(1 + i));
  KDT_BENCH_CUDA(cudaStreamEndCapture(launch_.stream, &graph));
  KDT_BENCH_CUDA(cudaGraphInstantiate(&ready, graph, 0));
  const double time = Median([&](int) { return cudaGraphLaunch(ready, launch_.stream); });
  KDT_BENCH_CUDA(cudaGraphExecDestroy(ready));
  KDT_BENCH_CUDA(cudaGraphDestroy(graph));
  return time / count;
}

void Bench::Report(Row row) {
  row.roof_microseconds = std::max(row.bytes / rates_.read, row.flop / rates_.mma) * 1e6;
  std::printf("%-16s %-34s %9.1f us  %8.1f MB  %8.2f GFLOP  roof %7.1f us  %5.1f%%", row.op.c_str(),
              row.shape.c_str(), row.microseconds, row.bytes * 1e-6, row.flop * 1e-9, row.roof_microseconds,
              100.0 * row.roof_microseconds / row.microseconds);
  ForEachFloor(row.floor, [](const char* name, const ReadTime& time) {
    std::printf("  %s %.2f us", name, time.microseconds);
  });
  std::printf("\n");
  rows_.push_back(std::move(row));
}

void Bench::WriteJson(const std::string& path, const std::string& device) const {
  std::ofstream file(path);
  file << "{\"device\": \"" << device << "\", \"read_bytes_per_s\": " << rates_.read
       << ", \"mma_flop_per_s\": " << rates_.mma << ", \"results\": [\n";
  for (size_t i = 0; i < rows_.size(); ++i) {
    const Row& r = rows_[i];
    file << "  {\"op\": \"" << r.op << "\", \"shape\": \"" << r.shape << "\", \"us\": " << r.microseconds
         << ", \"bytes\": " << r.bytes << ", \"flop\": " << r.flop << ", \"roof_us\": " << r.roof_microseconds
         << FloorJson(r.floor) << "}" << (i + 1 < rows_.size() ? ",\n" : "\n");
  }
  file << "]}\n";
}

}  // namespace kdt::bench

int main(int argc, char** argv) {
  std::string op, json;
  int repeats = 21, context = 4096;  // of a layer
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--op") op = argv[i + 1];
    if (flag == "--json") json = argv[i + 1];
    if (flag == "--context") context = std::max(1, std::atoi(argv[i + 1]));
    if (flag == "--repeats") repeats = std::max(1, std::atoi(argv[i + 1]));
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "kdt-kernel-bench: no GPU\n");
    return 1;
  }
  kdt::bench::Bench bench(repeats);
  if (op.empty() || op == "verify_attention") kdt::bench::BenchVerifyAttention(bench);
  if (op.empty() || op == "moe") kdt::bench::BenchMoe(bench);
  if (op.empty() || op == "moe_sharding") kdt::bench::BenchMoeSharding(bench);
  if (op.empty() || op == "gemm") kdt::bench::BenchGemm(bench);
  if (op.empty() || op == "small") kdt::bench::BenchSmallOps(bench);
  if (op.empty() || op == "layer") kdt::bench::BenchLayer(bench, context);
  if (op.empty() || op == "fragmentation") kdt::bench::BenchFragmentation(bench);
  cudaDeviceProp properties;
  KDT_BENCH_CUDA(cudaGetDeviceProperties(&properties, 0));
  if (!json.empty()) bench.WriteJson(json, properties.name);
  return 0;
}
