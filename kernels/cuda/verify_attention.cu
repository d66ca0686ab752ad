// Chooses the tile of query rows by how many a sequence brings, and queues the partial and the reduce kernel.
#include "kernels/cuda/ops.h"
#include "kernels/cuda/verify_attention/partial.cuh"
#include "kernels/cuda/verify_attention/reduce.cuh"

namespace kdt::cuda {
namespace {

constexpr int kMinSplitKeys = 64;  // below this a split's fixed costs outweigh its share of the keys
constexpr float kLog2E = 1.44269504f;

using Small =
    VerifyConfig<1, 1, 5, 2>;  // up to 16 query rows a sequence: two blocks a multiprocessor hide latency
using Middle = VerifyConfig<2, 1, 4, 2>;  // up to 32
using Large = VerifyConfig<2, 2, 4, 1>;

// Items and query tiles a launch can have at most (see plan.cuh).
template <class C>
int64_t MaxTiles(int64_t rows, int64_t heads, int64_t sequences) {
  return rows * heads / C::kTileRows + sequences;
}
template <class C>
int64_t MaxItems(int processors, int64_t rows, int64_t heads, int64_t sequences) {
  return processors * C::kMinBlocks + MaxTiles<C>(rows, heads, sequences);
}
template <class C>
size_t WorkspaceBytes(int processors, int64_t rows, int64_t heads, int64_t sequences) {
  constexpr size_t kRowBytes = kLatent * 2 + sizeof(float2) + 4 * sizeof(float);
  return MaxItems<C>(processors, rows, heads, sequences) * C::kTileRows * kRowBytes;
}

template <class C>
cudaError_t Run(const Launch& launch, const kernels::VerifyAttentionArgs& args) {
  static const cudaError_t prepared =
      cudaFuncSetAttribute(VerifyPartial<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes);
  if (prepared != cudaSuccess) return prepared;
  const int64_t tiles = MaxTiles<C>(args.q.rows, args.heads, args.sequences);
  const int64_t items = MaxItems<C>(launch.processors, args.q.rows, args.heads, args.sequences);
  if (WorkspaceBytes<C>(launch.processors, args.q.rows, args.heads, args.sequences) >
          launch.workspace_bytes ||
      launch.processors * C::kMinBlocks > kMaxSplits) {
    return cudaErrorInvalidValue;
  }
  VerifyParams p;
  p.q = args.q.bf16();
  p.q_stride = args.q.stride;
  p.pool = args.pool.bf16();
  p.pool_stride_bytes = static_cast<int>(args.pool.stride * 2);
  p.out = args.out.bf16();
  p.out_stride = args.out.stride;
  p.heads = static_cast<int>(args.heads);
  p.heads_inverse = 1.0f / static_cast<float>(args.heads);
  p.scale_log2 = args.scale * kLog2E;
  p.sequences = static_cast<int>(args.sequences);
  p.row_begin = args.row_begin;
  p.context_length = args.context_length;
  p.causal = args.causal;
  p.slot_table = args.slot_table;
  p.table_stride = args.table_stride;
  p.ancestor_bits = args.ancestor_bits;
  p.slots = launch.processors * C::kMinBlocks;
  p.min_split_keys = kMinSplitKeys;
  p.partial = static_cast<uint4*>(launch.workspace);
  p.partial_ml = reinterpret_cast<float2*>(p.partial + items * C::kTileRows * 64);
  p.partial_scale = reinterpret_cast<float*>(p.partial_ml + items * C::kTileRows);

  VerifyPartial<C><<<static_cast<int>(items), C::kThreads, C::kSharedBytes, launch.stream>>>(p);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;

  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(tiles * C::kTileRows * 2));
  config.stream = launch.stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  // The fewer query tiles, the more splits each has and the more warps share them; all blocks run in one
  // wave.
  const int64_t rows = args.q.rows * args.heads;
  if (rows <= C::kTileRows) {
    config.blockDim = dim3(512);
    return cudaLaunchKernelEx(&config, VerifyReduce<C, 16>, p);
  }
  if (rows <= 2 * C::kTileRows) {
    config.blockDim = dim3(256);
    return cudaLaunchKernelEx(&config, VerifyReduce<C, 8>, p);
  }
  config.blockDim = dim3(128);
  return cudaLaunchKernelEx(&config, VerifyReduce<C, 4>, p);
}

}  // namespace

cudaError_t VerifyAttention(const Launch& launch, const kernels::VerifyAttentionArgs& args) {
  if (args.q.rows == 0 || args.sequences == 0) return cudaSuccess;
  const bool fits = args.latent == kLatent && args.rope == kRope && args.q.dtype == kernels::DType::kBF16 &&
                    args.pool.dtype == kernels::DType::kBF16 && args.out.dtype == kernels::DType::kBF16 &&
                    args.q.stride % 8 == 0 && args.pool.stride % 8 == 0 && args.out.stride % 2 == 0;
  if (!fits) return cudaErrorInvalidValue;
  const int64_t rows =
      (args.q.rows + args.sequences - 1) / args.sequences * args.heads;  // query rows a sequence
  if (rows <= Small::kTileRows) return Run<Small>(launch, args);
  if (rows <= Middle::kTileRows) return Run<Middle>(launch, args);
  return Run<Large>(launch, args);
}

}  // namespace kdt::cuda
