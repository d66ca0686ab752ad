#include "tests/gpu/shapes/kernel_names.h"

#include <cuda.h>

#include <vector>

#include "tests/gpu/shapes/shapes.h"

namespace kdt::shapes {
namespace {

// The runtime's own call knows only functions of this program, which those of a captured library are not.
template <typename Call>
Call* Find(const char* symbol) {
  constexpr unsigned kVersion = 12030;  // that brought the youngest of them
  void* call = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  Check(cudaGetDriverEntryPointByVersion(symbol, &call, kVersion, cudaEnableDefault, &found), symbol);
  if (found != cudaDriverEntryPointSuccess) Fail(std::string("the driver has no ") + symbol);
  return reinterpret_cast<Call*>(call);
}

}  // namespace

std::set<std::string> KernelNames(cudaGraph_t graph) {
  static const auto node_params = Find<decltype(::cuGraphKernelNodeGetParams)>("cuGraphKernelNodeGetParams");
  static const auto function_of = Find<decltype(::cuKernelGetFunction)>("cuKernelGetFunction");
  static const auto name_of = Find<decltype(::cuFuncGetName)>("cuFuncGetName");
  size_t count = 0;
  Check(cudaGraphGetNodes(graph, nullptr, &count), "nodes");
  std::vector<cudaGraphNode_t> nodes(count);
  Check(cudaGraphGetNodes(graph, nodes.data(), &count), "nodes");
  std::set<std::string> names;
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type;
    Check(cudaGraphNodeGetType(node, &type), "a node");
    if (type != cudaGraphNodeTypeKernel) continue;
    CUDA_KERNEL_NODE_PARAMS params{};
    const char* name = nullptr;
    if (node_params(node, &params) != CUDA_SUCCESS) Fail("a kernel of a graph is unknown");
    CUfunction function = params.func;
    if (function == nullptr && function_of(&function, params.kern) != CUDA_SUCCESS)
      Fail("a kernel has no function");
    if (name_of(&name, function) != CUDA_SUCCESS) Fail("a kernel has no name");
    names.insert(name);
  }
  return names;
}

}  // namespace kdt::shapes
