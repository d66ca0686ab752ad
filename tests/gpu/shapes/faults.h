// Kernels with a fault each, on purpose: what a tool of compute-sanitizer must report here, or its silence
// elsewhere means nothing.
#pragma once

#include <string>
#include <vector>

namespace kdt::shapes {

// Names of the tools.
std::vector<std::string> Faults();
void RunFault(const std::string& tool);

}  // namespace kdt::shapes
