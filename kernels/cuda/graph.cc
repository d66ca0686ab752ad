#include "kernels/cuda/graph.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/kernel_use.h"

namespace kdt::cuda {
namespace {

class CudaGraph final : public kernels::Graph {
 public:
  CudaGraph(cudaGraphExec_t graph, int64_t nodes, std::vector<kernels::KernelUse> uses, cudaStream_t stream,
            int64_t* replays)
      : graph_(graph), nodes_(nodes), uses_(std::move(uses)), stream_(stream), replays_(replays) {}
  ~CudaGraph() override { (void)cudaGraphExecDestroy(graph_); }

  absl::Status Replay() override {
    ++*replays_;
    return KDT_CUDA_STATUS(cudaGraphLaunch(graph_, stream_));
  }
  int64_t nodes() const override { return nodes_; }
  const std::vector<kernels::KernelUse>& kernel_uses() const override { return uses_; }

 private:
  cudaGraphExec_t graph_;
  int64_t nodes_;
  std::vector<kernels::KernelUse> uses_;
  cudaStream_t stream_;
  int64_t* replays_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<kernels::Graph>> CaptureGraph(cudaStream_t stream,
                                                             absl::FunctionRef<absl::Status()> record,
                                                             int64_t* replays) {
  // Thread-local: what other threads of the process do with the device meanwhile is none of our business.
  KDT_CUDA_RETURN_IF_ERROR(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  const absl::Status recorded = record();
  cudaGraph_t graph = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
  if (!recorded.ok() || ended != cudaSuccess) {
    (void)cudaGetLastError();  // the capture's failure says nothing about the work that follows
    if (graph != nullptr) (void)cudaGraphDestroy(graph);
    if (!recorded.ok()) return absl::Status(recorded.code(), absl::StrCat("capture: ", recorded.message()));
    return CallStatus(ended, "cudaStreamEndCapture", __FILE__, __LINE__);
  }
  size_t nodes = 0;
  absl::Status status = KDT_CUDA_STATUS(cudaGraphGetNodes(graph, nullptr, &nodes));
  cudaGraphExec_t executable = nullptr;
  if (status.ok()) status = KDT_CUDA_STATUS(cudaGraphInstantiate(&executable, graph, 0));
  std::vector<kernels::KernelUse> uses = KernelUses(graph);
  (void)cudaGraphDestroy(graph);
  if (!status.ok()) return status;
  auto made =
      std::make_unique<CudaGraph>(executable, static_cast<int64_t>(nodes), std::move(uses), stream, replays);
  // The first replay would upload it otherwise.
  KDT_CUDA_RETURN_IF_ERROR(cudaGraphUpload(executable, stream));
  return made;
}

}  // namespace kdt::cuda
