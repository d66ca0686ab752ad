#include "kernels/cuda/graph_kernels.h"

#include <utility>

namespace kdt::cuda {

void* FindDriverCall(const char* symbol) {
  constexpr unsigned kVersion = 12030;  // that brought the youngest of them
  void* call = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(symbol, &call, kVersion, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? call : nullptr;
}

std::optional<std::vector<GraphKernel>> KernelsOf(cudaGraph_t graph) {
  static const auto node_params =
      DriverCall<decltype(::cuGraphKernelNodeGetParams)>("cuGraphKernelNodeGetParams");
  static const auto function_of = DriverCall<decltype(::cuKernelGetFunction)>("cuKernelGetFunction");
  static const auto name_of = DriverCall<decltype(::cuFuncGetName)>("cuFuncGetName");
  size_t count = 0;
  if (node_params == nullptr || function_of == nullptr || name_of == nullptr ||
      cudaGraphGetNodes(graph, nullptr, &count) != cudaSuccess) {
    return std::nullopt;
  }
  std::vector<cudaGraphNode_t> nodes(count);
  if (count > 0 && cudaGraphGetNodes(graph, nodes.data(), &count) != cudaSuccess) return std::nullopt;
  std::vector<GraphKernel> kernels;
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type = cudaGraphNodeTypeKernel;  // where it is not told
    cudaGraphNodeGetType(node, &type);
    if (type != cudaGraphNodeTypeKernel) continue;
    GraphKernel kernel;
    const char* name = nullptr;
    if (node_params(node, &kernel.params) == CUDA_SUCCESS) {
      kernel.function = kernel.params.func;
      const bool known =
          kernel.function != nullptr || function_of(&kernel.function, kernel.params.kern) == CUDA_SUCCESS;
      if (known && name_of(&name, kernel.function) == CUDA_SUCCESS && name != nullptr) kernel.name = name;
    }
    kernels.push_back(std::move(kernel));
  }
  return kernels;
}

}  // namespace kdt::cuda
