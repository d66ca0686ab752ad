// How the kernels of a captured graph sit on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "kdt/kernels/backend.h"

namespace kdt::cuda {

// For each main kernel among the graph's nodes, by its op's name; several nodes of a kernel count together.
// Kernels of other libraries are not listed.
std::vector<kernels::KernelUse> KernelUses(cudaGraph_t graph);

}  // namespace kdt::cuda
