// One block a row: warps for the q latent, warps for the kv latent, a chunk of eight values a lane, and one
// warp for the rope part.
#include "kernels/cuda/common/chunk.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

constexpr int kMaxThreads = 1024;

template <typename T, typename P>
__global__ void __launch_bounds__(kMaxThreads)
    MlaPrepareKernel(const __grid_constant__ kernels::MlaPrepareArgs args, int q_warps) {
  __shared__ float shared[kMaxThreads / 32];
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int latent_warps = static_cast<int>(blockDim.x / 32) - q_warps - 1;
  const int width = static_cast<int>(args.latent), half = static_cast<int>(args.rope / 2);
  T* const row = static_cast<T*>(args.qkv.data) + blockIdx.x * args.qkv.stride;
  const bool is_q = warp < q_warps, is_rope = warp == q_warps + latent_warps;
  const int first_warp = is_q ? 0 : q_warps;
  const int chunk = (warp - first_warp) * 32 + lane;
  const bool mine = !is_rope && chunk < static_cast<int>(is_q ? args.q_lora : args.latent) / 8;
  const uint4 weight =
      mine ? reinterpret_cast<const uint4*>(is_q ? args.q_norm : args.kv_norm)[chunk] : uint4{};
  const float frequency = is_rope && lane < half ? args.inv_freq[lane] : 0.0f;
  LaunchDependents();
  WaitForPrevious();
  const int64_t slot = args.slots[blockIdx.x];
  P* const pool = static_cast<P*>(args.pool.data) + slot * args.pool.stride;  // used if slot >= 0
  if (is_rope && slot >= 0) {
    const float position = static_cast<float>(args.positions[blockIdx.x]);
    const T* from = row + args.q_lora + args.latent;
    for (int i = lane; i < half; i += 32) {
      float sin, cos;
      sincosf(position * (i == lane ? frequency : args.inv_freq[i]), &sin, &cos);
      sin *= args.attention_factor;
      cos *= args.attention_factor;
      const float a = ToFloat(from[2 * i]), b = ToFloat(from[2 * i + 1]);
      pool[width + 2 * i] = FromFloat<P>(Rounded<T>(a * cos - b * sin));
      pool[width + 2 * i + 1] = FromFloat<P>(Rounded<T>(b * cos + a * sin));
    }
  }
  float v[8] = {};
  T* const at = row + (is_q ? 0 : args.q_lora) + chunk * 8;
  if (mine) Load8(v, at);
  const float squares = WarpSum(Squares8(v));
  if (lane == 0) shared[warp] = squares;
  __syncthreads();
  if (is_rope) return;
  const int warps = is_q ? q_warps : latent_warps;
  const float sum = WarpSum(lane < warps ? shared[first_warp + lane] : 0.0f);
  if (!mine) return;
  const float n = static_cast<float>(is_q ? args.q_lora : args.latent);
  Scale8<T>(v, rsqrtf(sum / n + args.eps), weight);
  if (is_q) {
    Store8(at, v);
  } else if (slot >= 0) {
#pragma unroll
    for (float& value : v) value = Rounded<T>(value);
    Store8(pool + chunk * 8, v);
  }
}

}  // namespace

cudaError_t MlaPrepare(const Launch& launch, const kernels::MlaPrepareArgs& args) {
  if (args.qkv.rows == 0) return cudaSuccess;
  const int q_warps = Blocks(args.q_lora, 256), threads = (q_warps + Blocks(args.latent, 256) + 1) * 32;
  const bool fits = threads <= kMaxThreads && args.q_lora % 8 == 0 && args.latent % 8 == 0 &&
                    args.rope % 2 == 0 && args.qkv.stride % 8 == 0 && args.pool.stride % 8 == 0 &&
                    reinterpret_cast<uintptr_t>(args.qkv.data) % 16 == 0 &&
                    reinterpret_cast<uintptr_t>(args.pool.data) % 16 == 0 &&
                    reinterpret_cast<uintptr_t>(args.q_norm) % 16 == 0 &&
                    reinterpret_cast<uintptr_t>(args.kv_norm) % 16 == 0;
  if (!fits) return cudaErrorInvalidValue;
  return ByType(args.qkv.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    return ByType(args.pool.dtype, [&](auto* u) {
      using P = std::remove_pointer_t<decltype(u)>;
      return LaunchAfter(launch, MlaPrepareKernel<T, P>, dim3(static_cast<unsigned>(args.qkv.rows)),
                         dim3(threads), 0, args, q_warps);
    });
  });
}

}  // namespace kdt::cuda
