#include "kernels/cuda/kernel_use.h"

#include <cstdint>
#include <iterator>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "kernels/cuda/graph_kernels.h"

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

}  // namespace

std::vector<kernels::KernelUse> KernelUses(cudaGraph_t graph) {
  static const auto resident_blocks = DriverCall<decltype(::cuOccupancyMaxActiveBlocksPerMultiprocessor)>(
      "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  int device = 0, processors = 0, most_threads = 0;
  if (resident_blocks == nullptr || cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&most_threads, cudaDevAttrMaxThreadsPerMultiProcessor, device) != cudaSuccess) {
    return {};
  }
  const auto kernels = KernelsOf(graph);
  if (!kernels.has_value()) return {};
  Sums sums[kCount];
  for (const auto& [name, function, params] : *kernels) {
    for (size_t k = 0; k < kCount; ++k) {
      if (!absl::StrContains(name, kMainKernels[k].function)) continue;
      const unsigned threads = params.blockDimX * params.blockDimY * params.blockDimZ;
      int blocks = 0;  // resident on a multiprocessor
      if (resident_blocks(&blocks, function, static_cast<int>(threads), params.sharedMemBytes) !=
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
