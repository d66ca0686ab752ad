// cuBLASLt for many rows, where it is installed. It is opened at run time, so nothing needs it to start or to
// build.
#pragma once

#include "kernels/cuda/ops.h"

namespace kdt::cuda {

// Whether the library could be opened.
bool HaveLibrary();

// y (+)= x W^T. cudaErrorNotSupported: the library has nothing for this shape, or is not there.
cudaError_t LibraryGemm(const Launch& launch, const kernels::GemmArgs& args);

}  // namespace kdt::cuda
