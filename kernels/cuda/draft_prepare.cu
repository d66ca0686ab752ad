// dim / 8 lanes a head's vector, a chunk of eight values each; a vector's rope partner is half its lanes
// away. A row's vectors (queries, then of each layer keys and, with slots, values) are shared by the blocks
// of its column of the grid.
#include "kernels/cuda/common/chunk.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxDim = 256;
constexpr int kMaxLayers = 32;  // a launch

struct Params {
  kernels::DraftPrepareArgs args;  // its k_norms is not used
  const uint16_t* k_norms[kMaxLayers];
  int queries, vectors;  // a row's
};

template <typename T, typename P>
__global__ void __launch_bounds__(kThreads) DraftPrepareKernel(const __grid_constant__ Params p) {
  __shared__ float cosines[kMaxDim / 2], sines[kMaxDim / 2];
  const kernels::DraftPrepareArgs& a = p.args;
  const int dim = static_cast<int>(a.dim), lanes = dim / 8, kv_heads = static_cast<int>(a.kv_heads);
  const int chunk = static_cast<int>(threadIdx.x) % lanes;
  const int vector = static_cast<int>(blockIdx.y * (kThreads / lanes) + threadIdx.x / lanes);
  const bool there = vector < p.vectors, is_query = vector < p.queries;
  // Of the vectors behind the queries a layer has its keys and, where they are to be written, its values.
  const int per_layer = a.slots != nullptr ? 2 * kv_heads : kv_heads;
  const int behind = is_query ? 0 : vector - p.queries;
  const int layer = behind / per_layer, within = behind % per_layer;
  const bool is_value = !is_query && within >= kv_heads;
  const bool turned = there && !is_value;
  uint4 weight{};
  if (turned) weight = reinterpret_cast<const uint4*>(is_query ? a.q_norm : p.k_norms[layer])[chunk];
  const bool makes_angle = static_cast<int>(threadIdx.x) < dim / 2;
  const float frequency = makes_angle ? a.inv_freq[threadIdx.x] : 0.0f;
  LaunchDependents();
  WaitForPrevious();
  T* const at = is_query ? static_cast<T*>(a.q.data) + blockIdx.x * a.q.stride + vector * dim + chunk * 8
                         : static_cast<T*>(a.kv.data) + blockIdx.x * a.kv.stride +
                               (layer * 2 * kv_heads + within) * dim + chunk * 8;
  float v[8] = {};
  if (there) Load8(v, at);
  if (makes_angle) {
    float sin, cos;
    sincosf(static_cast<float>(a.positions[blockIdx.x]) * frequency, &sin, &cos);
    sines[threadIdx.x] = sin * a.attention_factor;
    cosines[threadIdx.x] = cos * a.attention_factor;
  }
  __syncthreads();
  float squares = Squares8(v);
  for (int d = lanes / 2; d > 0; d >>= 1) squares += __shfl_xor_sync(~0u, squares, d);
  float partner[8];
  if (turned) {
    Scale8<T>(v, rsqrtf(squares / static_cast<float>(dim) + a.eps), weight);
#pragma unroll
    for (float& value : v) value = Rounded<T>(value);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) partner[i] = __shfl_xor_sync(~0u, v[i], lanes / 2);
  if (turned) {
    const int first = chunk % (lanes / 2) * 8;
    const float sign = chunk < lanes / 2 ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      v[i] = Rounded<T>(v[i] * cosines[first + i] + sign * partner[i] * sines[first + i]);
    }
  }
  if (!there) return;
  if (is_query || a.slots == nullptr) {
    Store8(at, v);
    return;
  }
  const int64_t slot = a.slots[blockIdx.x];
  if (slot < 0) return;
  Store8(static_cast<P*>(a.pool.data) + layer * a.pool_layer_stride + slot * a.pool.stride + within * dim +
             chunk * 8,
         v);
}

}  // namespace

cudaError_t DraftPrepare(const Launch& launch, const kernels::DraftPrepareArgs& args) {
  if (args.kv.rows == 0) return cudaSuccess;
  const bool has_q = args.q.data != nullptr, writes = args.slots != nullptr;
  const int lanes = static_cast<int>(args.dim / 8);
  const bool fits = args.dim % 16 == 0 && args.dim <= kMaxDim && (lanes & (lanes - 1)) == 0 &&
                    InChunks(args.kv) && (!has_q || (InChunks(args.q) && args.q.dtype == args.kv.dtype)) &&
                    (!writes || (InChunks(args.pool) && args.pool_layer_stride % 8 == 0));
  if (!fits) return cudaErrorInvalidValue;
  const int64_t width = args.kv_heads * args.dim;
  for (int64_t begin = 0; begin < args.layers; begin += kMaxLayers) {
    const int64_t layers = args.layers - begin < kMaxLayers ? args.layers - begin : kMaxLayers;
    Params p{args, {}, has_q && begin == 0 ? static_cast<int>(args.heads) : 0, 0};
    p.args.kv = args.kv.Columns(begin * 2 * width, layers * 2 * width);
    p.args.pool.data = static_cast<char*>(args.pool.data) +
                       begin * args.pool_layer_stride * kernels::DTypeSize(args.pool.dtype);
    for (int64_t l = 0; l < layers; ++l) p.k_norms[l] = args.k_norms[begin + l];
    p.vectors = p.queries + static_cast<int>(layers * args.kv_heads * (writes ? 2 : 1));
    const cudaError_t error = ByType(args.kv.dtype, [&](auto* t) {
      using T = std::remove_pointer_t<decltype(t)>;
      return ByType(args.pool.dtype, [&](auto* u) {
        using P = std::remove_pointer_t<decltype(u)>;
        return LaunchAfter(launch, DraftPrepareKernel<T, P>,
                           dim3(static_cast<unsigned>(args.kv.rows), Blocks(p.vectors, kThreads / lanes)),
                           kThreads, 0, p);
      });
    });
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace kdt::cuda
