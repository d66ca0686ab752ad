// Random weights of any size from nothing but names and shapes, for benchmarks of models whose checkpoint is
// not at hand. A few blocks of random values are mapped over and over, so tensors of any size cost no memory.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kdt/kernels/backend.h"
#include "worker/model/weight_source.h"

namespace kdt {

// Matrices [out, in] have a standard deviation of 1 / sqrt(in), so that activations keep their size; the
// embedding has 1; norms are 1, biases 0.
std::unique_ptr<WeightSource> MakeRandomSource();

// Fills a buffer with numbers of standard deviation 1.
absl::Status FillRandom(kernels::Backend& backend, kernels::DType dtype, const kernels::Buffer& buffer);

}  // namespace kdt
