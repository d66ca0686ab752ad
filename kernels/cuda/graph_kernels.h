// The kernels of a captured graph. The driver is asked: the runtime's calls know only functions that they can
// lead back to a symbol of this program, which those of captured launches need not be.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <optional>
#include <string>
#include <vector>

namespace kdt::cuda {

struct GraphKernel {
  std::string name;  // as the compiler names it; empty: the driver does not tell this node's
  CUfunction function = nullptr;
  CUDA_KERNEL_NODE_PARAMS params{};
};

// In the order of the graph's nodes. nullopt: the driver has not all calls, or does not list the nodes.
std::optional<std::vector<GraphKernel>> KernelsOf(cudaGraph_t graph);

// The driver's call of that name; nullptr: it has none. Nothing is linked against the driver.
void* FindDriverCall(const char* symbol);
template <typename Call>
Call* DriverCall(const char* symbol) {
  return reinterpret_cast<Call*>(FindDriverCall(symbol));
}

}  // namespace kdt::cuda
