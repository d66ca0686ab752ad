#pragma once

#include <cuda_runtime_api.h>

#include <set>
#include <string>

namespace kdt::shapes {

// Of the kernels in a graph, as the compiler names them.
std::set<std::string> KernelNames(cudaGraph_t graph);

}  // namespace kdt::shapes
