#include "worker/collective/cuda/measure.h"

#include <algorithm>
#include <array>
#include <utility>

#include "common/status.h"
#include "kernels/cuda/check.h"
#include "worker/collective/cuda/cuda_collective.h"

namespace kdt {
namespace {

constexpr size_t kSmallest = size_t{8} << 10, kLargest = size_t{4} << 20;
// Fewer calls of what takes long: the whole is to take tens of milliseconds.
constexpr size_t kLong = size_t{256} << 10;
constexpr int kCalls = 24, kLongCalls = 4, kReplays = 7;
constexpr float kTooSlowMicros = 1000;  // ranks that take turns on a GPU need ten times that

class Events {
 public:
  ~Events() {
    for (const cudaEvent_t event : {begin, end}) {
      if (event != nullptr) (void)cudaEventDestroy(event);
    }
  }
  absl::Status Make() {
    KDT_CUDA_RETURN_IF_ERROR(cudaEventCreate(&begin));
    return KDT_CUDA_STATUS(cudaEventCreate(&end));
  }
  cudaEvent_t begin = nullptr, end = nullptr;
};

class CapturedCalls {
 public:
  ~CapturedCalls() {
    if (exec_ != nullptr) (void)cudaGraphExecDestroy(exec_);
  }
  absl::Status Capture(cudaStream_t stream, int calls, absl::FunctionRef<absl::Status()> call) {
    KDT_CUDA_RETURN_IF_ERROR(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    absl::Status status;
    for (int i = 0; i < calls && status.ok(); ++i) status = call();
    cudaGraph_t graph = nullptr;
    const absl::Status ended = KDT_CUDA_STATUS(cudaStreamEndCapture(stream, &graph));
    if (status.ok()) status = ended;
    if (status.ok()) status = KDT_CUDA_STATUS(cudaGraphInstantiate(&exec_, graph, 0));
    if (graph != nullptr) (void)cudaGraphDestroy(graph);
    return status;
  }
  absl::Status Replay(cudaStream_t stream) { return KDT_CUDA_STATUS(cudaGraphLaunch(exec_, stream)); }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

absl::Status MeasureAll(CudaCollective& collective, void* x, size_t largest,
                        std::vector<ReduceTimes>* times) {
  for (size_t bytes = kSmallest; bytes <= std::min(largest, kLargest); bytes *= 2) {
    ReduceTimes mine;
    mine.bytes = bytes;
    for (int m = 0; m < kReduceMethods; ++m) {
      const auto method = static_cast<ReduceMethod>(m);
      if (!collective.Has(method)) continue;
      KDT_ASSIGN_OR_RETURN(mine.micros[m], MeasureReduce(collective, method, x, bytes,
                                                         bytes > kLong ? kLongCalls : kCalls, kReplays));
    }
    KDT_ASSIGN_OR_RETURN(const std::vector<ReduceTimes> all, collective.exchange().Gather(mine));
    times->push_back(all[0]);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<float> MeasureCalls(CudaCollective& collective, int calls, int replays,
                                   absl::FunctionRef<absl::Status()> call) {
  CapturedCalls captured;
  Events events;
  KDT_RETURN_IF_ERROR(events.Make());
  KDT_RETURN_IF_ERROR(captured.Capture(collective.stream(), calls, call));
  std::vector<float> micros;
  for (int i = 0; i <= replays; ++i) {  // the first one warms up
    KDT_CUDA_RETURN_IF_ERROR(cudaEventRecord(events.begin, collective.stream()));
    KDT_RETURN_IF_ERROR(captured.Replay(collective.stream()));
    KDT_CUDA_RETURN_IF_ERROR(cudaEventRecord(events.end, collective.stream()));
    KDT_RETURN_IF_ERROR(collective.FinishStream());
    float millis = 0;
    KDT_CUDA_RETURN_IF_ERROR(cudaEventElapsedTime(&millis, events.begin, events.end));
    if (i > 0) micros.push_back(millis * 1000 / static_cast<float>(calls));
  }
  std::nth_element(micros.begin(), micros.begin() + replays / 2, micros.end());
  return micros[static_cast<size_t>(replays / 2)];
}

absl::StatusOr<float> MeasureReduce(CudaCollective& collective, ReduceMethod method, void* x, size_t bytes,
                                    int calls, int replays) {
  const auto values = static_cast<int64_t>(bytes / 2);
  const kernels::Tensor tensor = kernels::MakeTensor(x, kernels::DType::kBF16, 1, values);
  return MeasureCalls(collective, calls, replays, [&] { return collective.ReduceBy(method, tensor); });
}

absl::StatusOr<std::vector<ReduceTimes>> MeasureChoice(CudaCollective& collective, size_t largest) {
  void* x = nullptr;
  KDT_RETURN_IF_ERROR(collective.exchange().Agree(KDT_CUDA_STATUS(cudaMalloc(&x, kLargest))));
  std::vector<ReduceTimes> times;
  const auto run = [&]() -> absl::Status {
    KDT_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(x, 0, kLargest, collective.stream()));
    KDT_ASSIGN_OR_RETURN(const float mine,
                         MeasureReduce(collective, ReduceMethod::kOneShot, x, kSmallest, 1, 1));
    KDT_ASSIGN_OR_RETURN(const std::vector<float> all, collective.exchange().Gather(mine));
    if (*std::max_element(all.begin(), all.end()) > kTooSlowMicros) return absl::OkStatus();
    return MeasureAll(collective, x, largest, &times);
  };
  const absl::Status status = run();
  (void)cudaFree(x);
  if (!status.ok()) return status;
  return times;
}

}  // namespace kdt
