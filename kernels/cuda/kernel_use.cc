#include "kernels/cuda/kernel_use.h"

#include <cuda.h>

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
                    {"MoeKernel", "moe"},
                    {"StreamKernel", "gemm_stream"},
                    {"WholeKernel", "gemm_whole"},
                    {"HeldKernel", "gemm_held"},
                    {"EvenKernel", "gemm_even"},
                    {"BroadKernel", "gemm_broad"},
                    {"SquareKernel", "gemm_square"},
                    {"TileKernel", "gemm_tile"},
                    {"MlaQueryKernel", "mla_query"},
                    {"PlainKernel", "gemm_plain"},
                    {"DraftKernel", "draft_attention"}};
constexpr size_t kCount = std::size(kMainKernels);

struct Sums {
  double launched = 0, resident = 0;  // blocks
  double warps = 0, most_warps = 0;   // a multiprocessor
};

// The driver's own calls: the runtime's know only functions that it can lead back to a symbol of this
// program, which those of captured launches need not be.
struct Driver {
  decltype(&::cuGraphKernelNodeGetParams) node_params = nullptr;
  decltype(&::cuKernelGetFunction) function_of = nullptr;
  decltype(&::cuFuncGetName) name_of = nullptr;
  decltype(&::cuOccupancyMaxActiveBlocksPerMultiprocessor) resident_blocks = nullptr;
  bool complete = false;

  Driver() {
    constexpr unsigned kVersion = 12030;  // that brought the youngest of them
    const auto find = [](const char* symbol, auto* call) {
      cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
      return cudaGetDriverEntryPointByVersion(symbol, reinterpret_cast<void**>(call), kVersion,
                                              cudaEnableDefault, &found) == cudaSuccess &&
             found == cudaDriverEntryPointSuccess;
    };
    complete = find("cuGraphKernelNodeGetParams", &node_params) &&
               find("cuKernelGetFunction", &function_of) && find("cuFuncGetName", &name_of) &&
               find("cuOccupancyMaxActiveBlocksPerMultiprocessor", &resident_blocks);
  }
};

}  // namespace

std::vector<kernels::KernelUse> KernelUses(cudaGraph_t graph) {
  static const Driver driver;
  int device = 0, processors = 0, most_threads = 0;
  size_t count = 0;
  if (!driver.complete || cudaGetDevice(&device) != cudaSuccess ||
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
    if (cudaGraphNodeGetType(node, &type) != cudaSuccess || type != cudaGraphNodeTypeKernel) continue;
    CUDA_KERNEL_NODE_PARAMS params{};
    const char* name = nullptr;
    if (driver.node_params(node, &params) != CUDA_SUCCESS) continue;
    CUfunction function = params.func;
    if (function == nullptr && driver.function_of(&function, params.kern) != CUDA_SUCCESS) continue;
    if (driver.name_of(&name, function) != CUDA_SUCCESS || name == nullptr) continue;
    for (size_t k = 0; k < kCount; ++k) {
      if (!absl::StrContains(name, kMainKernels[k].function)) continue;
      const unsigned threads = params.blockDimX * params.blockDimY * params.blockDimZ;
      int blocks = 0;  // resident on a multiprocessor
      if (driver.resident_blocks(&blocks, function, static_cast<int>(threads), params.sharedMemBytes) !=
          CUDA_SUCCESS) {
        break;
      }
      sums[k].launched += static_cast<double>(params.gridDimX) * params.gridDimY * params.gridDimZ;
      sums[k].resident += static_cast<double>(blocks) * processors;
      sums[k].warps += static_cast<double>(blocks) * threads;
      sums[k].most_warps += most_threads;
      break;
    }
  }
  std::vector<kernels::KernelUse> uses;
  for (size_t k = 0; k < kCount; ++k) {
    if (sums[k].resident == 0) continue;
    uses.push_back(
        {kMainKernels[k].op, sums[k].warps / sums[k].most_warps, sums[k].launched / sums[k].resident});
  }
  return uses;
}

}  // namespace kdt::cuda
