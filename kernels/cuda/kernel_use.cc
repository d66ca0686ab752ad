#include "kernels/cuda/kernel_use.h"

#include <cstdint>
#include <iterator>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"

namespace kdt::cuda {
namespace {

// Part of the kernel function's (mangled) name -> what it is reported as.
constexpr struct {
  absl::string_view function;
  const char* op;
} kMainKernels[] = {{"VerifyPartial", "verify_attention"},
                    {"VerifyReduce", "verify_attention_reduce"},
                    {"GateUpKernel", "moe_gate_up"},
                    {"DownKernel", "moe_down"},
                    {"MoeKernel", "moe"},
                    {"StreamKernel", "gemm_stream"},
                    {"TileKernel", "gemm_tile"},
                    {"PlainKernel", "gemm_plain"},
                    {"DraftKernel", "draft_attention"}};
constexpr size_t kCount = std::size(kMainKernels);

struct Sums {
  double launched = 0, resident = 0;  // blocks
  double warps = 0, most_warps = 0;   // a multiprocessor
};

}  // namespace

std::vector<kernels::KernelUse> KernelUses(cudaGraph_t graph) {
  int device = 0, processors = 0, most_threads = 0;
  size_t count = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&most_threads, cudaDevAttrMaxThreadsPerMultiProcessor, device) != cudaSuccess ||
      cudaGraphGetNodes(graph, nullptr, &count) != cudaSuccess) {
    return {};
  }
  std::vector<cudaGraphNode_t> nodes(count);
  if (count > 0 && cudaGraphGetNodes(graph, nodes.data(), &count) != cudaSuccess) return {};
  Sums sums[kCount];
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type;
    cudaKernelNodeParams params{};
    const char* name = nullptr;
    if (cudaGraphNodeGetType(node, &type) != cudaSuccess || type != cudaGraphNodeTypeKernel) continue;
    // Fails for functions that another copy of the runtime has loaded (NCCL's).
    if (cudaGraphKernelNodeGetParams(node, &params) != cudaSuccess ||
        cudaFuncGetName(&name, params.func) != cudaSuccess || name == nullptr) {
      continue;
    }
    for (size_t k = 0; k < kCount; ++k) {
      if (!absl::StrContains(name, kMainKernels[k].function)) continue;
      const unsigned threads = params.blockDim.x * params.blockDim.y * params.blockDim.z;
      int blocks = 0;  // resident on a multiprocessor
      if (cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, params.func, static_cast<int>(threads),
                                                        params.sharedMemBytes) != cudaSuccess) {
        break;
      }
      sums[k].launched += static_cast<double>(params.gridDim.x) * params.gridDim.y * params.gridDim.z;
      sums[k].resident += static_cast<double>(blocks) * processors;
      sums[k].warps += static_cast<double>(blocks) * threads;
      sums[k].most_warps += most_threads;
      break;
    }
  }
  (void)cudaGetLastError();  // nodes that were passed over say nothing about later work
  std::vector<kernels::KernelUse> uses;
  for (size_t k = 0; k < kCount; ++k) {
    if (sums[k].resident == 0) continue;
    uses.push_back(
        {kMainKernels[k].op, sums[k].warps / sums[k].most_warps, sums[k].launched / sums[k].resident});
  }
  return uses;
}

}  // namespace kdt::cuda
