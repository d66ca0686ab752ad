// One block a row; a thread makes the angle of a pair once and rotates that pair in every head.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

template <typename T>
__global__ void RopeKernel(T* x, int64_t stride, int64_t heads, int64_t head_stride, int64_t half,
                           int64_t step, int64_t partner, const int32_t* positions, const float* inv_freq,
                           float attention_factor) {
  LaunchDependents();
  WaitForPrevious();
  const float position = static_cast<float>(positions[blockIdx.x]);
  for (int64_t i = threadIdx.x; i < half; i += blockDim.x) {
    float sin, cos;
    sincosf(position * inv_freq[i], &sin, &cos);
    sin *= attention_factor;
    cos *= attention_factor;
    for (int64_t head = threadIdx.y; head < heads; head += blockDim.y) {
      T* first = x + blockIdx.x * stride + head * head_stride + i * step;
      const float a = ToFloat(first[0]), b = ToFloat(first[partner]);
      first[0] = FromFloat<T>(a * cos - b * sin);
      first[partner] = FromFloat<T>(b * cos + a * sin);
    }
  }
}

}  // namespace

cudaError_t Rope(const Launch& launch, const kernels::RopeArgs& args) {
  if (args.x.rows == 0 || args.heads == 0) return cudaSuccess;
  const int64_t half = args.dim / 2;
  const bool interleaved = args.layout == kernels::RopeLayout::kInterleaved;
  return ByType(args.x.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    return LaunchAfter(launch, RopeKernel<T>, dim3(static_cast<unsigned>(args.x.rows)),
                       dim3(32, args.heads < 8 ? static_cast<unsigned>(args.heads) : 8), 0,
                       Data<T>(args.x) + args.offset, args.x.stride, args.heads, args.head_stride, half,
                       interleaved ? 2 : 1, interleaved ? 1 : half, args.positions, args.inv_freq,
                       args.attention_factor);
  });
}

}  // namespace kdt::cuda
