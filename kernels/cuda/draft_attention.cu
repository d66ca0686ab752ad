// Attention of a draft block: a block of threads takes up to 64 query rows (block position x query head) of
// one sequence and one KV head against one of kSplits parts of the keys, 32 keys at a time in float32; the
// last part to finish merges them. The drafter's context is short or windowed as a rule, so this runs on the
// CUDA cores.
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

constexpr int kRows = 64;
constexpr int kKeys = 32;
constexpr int kMaxDim = 128;
constexpr int kThreads = 4 * kRows;  // four threads a row
constexpr int kSplits = 16;
constexpr int kPitch = kMaxDim + 4;
constexpr int kSharedBytes = (kRows + 2 * kKeys) * kPitch * 4 + kRows * (kKeys + 1) * 4;

struct Params {
  kernels::DraftAttentionArgs args;
  float* partial;  // [sequence, kv head, tile, split][kRows][dim + 2]: sum, reference, output
  unsigned* counters;
};

__global__ void __launch_bounds__(kThreads) DraftKernel(const __grid_constant__ Params p) {
  const kernels::DraftAttentionArgs& a = p.args;
  extern __shared__ float shared[];
  float* const queries = shared;
  float* const keys = queries + kRows * kPitch;
  float* const values = keys + kKeys * kPitch;
  float* const probabilities = values + kKeys * kPitch;
  const int dim = static_cast<int>(a.dim), group = static_cast<int>(a.heads / a.kv_heads),
            block = static_cast<int>(a.block);
  const int tiles = (block * group + kRows - 1) / kRows;
  const int tile = blockIdx.x % tiles, kv_head = blockIdx.x / tiles, sequence = blockIdx.y,
            split = blockIdx.z;
  const int row = threadIdx.x >> 2, part = threadIdx.x & 3;
  const bf16* const q = static_cast<const bf16*>(a.q.data);
  const bf16* const block_k = static_cast<const bf16*>(a.block_k.data);
  const bf16* const block_v = static_cast<const bf16*>(a.block_v.data);
  const bf16* const pool = static_cast<const bf16*>(a.pool.data);
  auto query_row = [&](int r) { return static_cast<int64_t>(sequence) * block + (tile * kRows + r) / group; };
  auto query_head = [&](int r) { return kv_head * group + (tile * kRows + r) % group; };
  for (int i = threadIdx.x; i < kRows * dim; i += kThreads) {
    const int r = i / dim, c = i % dim;
    const bool there = tile * kRows + r < block * group;
    queries[r * kPitch + c] =
        there ? ToFloat(q[query_row(r) * a.q.stride + query_head(r) * dim + c]) * a.scale : 0.0f;
  }
  const int begin = a.window_begin[sequence], context = a.context_length[sequence];
  const int length = max(0, context - begin) + block;
  const int chunks = (length + kKeys - 1) / kKeys;
  const int chunk_end = chunks * (split + 1) / kSplits;
  const int columns = dim / 4;
  float out[kMaxDim / 4] = {};
  float reference = -INFINITY, sum = 0.0f;
  for (int chunk = chunks * split / kSplits; chunk < chunk_end; ++chunk) {
    __syncthreads();
    for (int i = threadIdx.x; i < kKeys * dim; i += kThreads) {
      const int k = i / dim, c = i % dim, key = chunk * kKeys + k;
      float kk = 0.0f, vv = 0.0f;
      if (key < length - block) {
        const int64_t slot = a.slot_table[sequence * a.table_stride + begin + key];
        kk = ToFloat(pool[slot * a.pool.stride + kv_head * dim + c]);
        vv = ToFloat(pool[slot * a.pool.stride + (a.kv_heads + kv_head) * dim + c]);
      } else if (key < length) {
        const int64_t own = static_cast<int64_t>(sequence) * block + key - (length - block);
        kk = ToFloat(block_k[own * a.block_k.stride + kv_head * dim + c]);
        vv = ToFloat(block_v[own * a.block_v.stride + kv_head * dim + c]);
      }
      keys[k * kPitch + c] = kk;
      values[k * kPitch + c] = vv;
    }
    __syncthreads();
    float score[kKeys / 4], top = reference;
#pragma unroll
    for (int j = 0; j < kKeys / 4; ++j) {
      const int k = 4 * j + part;
      float dot = 0.0f;
      for (int c = 0; c < dim; c += 4) {
        const float4 x = *reinterpret_cast<const float4*>(queries + row * kPitch + c);
        const float4 y = *reinterpret_cast<const float4*>(keys + k * kPitch + c);
        dot = fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, fmaf(x.w, y.w, dot))));
      }
      score[j] = chunk * kKeys + k < length ? dot : -INFINITY;
      top = fmaxf(top, score[j]);
    }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float factor = reference == top ? 1.0f : expf(reference - top);
    reference = top;
    float added = 0.0f;
#pragma unroll
    for (int j = 0; j < kKeys / 4; ++j) {
      const float e = expf(score[j] - top);
      probabilities[row * (kKeys + 1) + 4 * j + part] = e;
      added += e;
    }
    added += __shfl_xor_sync(~0u, added, 1);
    added += __shfl_xor_sync(~0u, added, 2);
    sum = sum * factor + added;
    __syncwarp();
#pragma unroll
    for (int c = 0; c < kMaxDim / 4; ++c) out[c] *= factor;
    for (int k = 0; k < kKeys; ++k) {
      const float weight = probabilities[row * (kKeys + 1) + k];
#pragma unroll
      for (int c = 0; c < kMaxDim / 4; ++c) {
        if (c < columns) out[c] = fmaf(weight, values[k * kPitch + part * columns + c], out[c]);
      }
    }
  }

  const int64_t item = (static_cast<int64_t>(sequence) * gridDim.x + blockIdx.x);
  auto slot_of = [&](int s) { return p.partial + ((item * kSplits + s) * kRows + row) * (dim + 2); };
  float* const mine = slot_of(split);
  if (part == 0) mine[0] = sum, mine[1] = reference;
#pragma unroll
  for (int c = 0; c < kMaxDim / 4; ++c) {
    if (c < columns) mine[2 + part * columns + c] = out[c];
  }
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(p.counters + item, 1) == kSplits - 1;
    if (last) p.counters[item] = 0;
  }
  __syncthreads();
  if (!last || tile * kRows + row >= block * group) return;
  __threadfence();
  float top = -INFINITY, total = 0.0f;
  for (int s = 0; s < kSplits; ++s) top = fmaxf(top, __ldcg(slot_of(s) + 1));
#pragma unroll
  for (int c = 0; c < kMaxDim / 4; ++c) out[c] = 0.0f;
  for (int s = 0; s < kSplits; ++s) {
    const float* from = slot_of(s);
    const float part_reference = __ldcg(from + 1);
    if (part_reference == -INFINITY) continue;  // a part without keys
    const float factor = expf(part_reference - top);
    total += factor * __ldcg(from);
#pragma unroll
    for (int c = 0; c < kMaxDim / 4; ++c) {
      if (c < columns) out[c] = fmaf(factor, __ldcg(from + 2 + part * columns + c), out[c]);
    }
  }
  bf16* const to =
      static_cast<bf16*>(a.out.data) + query_row(row) * a.out.stride + query_head(row) * dim + part * columns;
#pragma unroll
  for (int c = 0; c < kMaxDim / 4; ++c) {
    if (c < columns) to[c] = FromFloat<bf16>(out[c] / total);
  }
}

}  // namespace

cudaError_t DraftAttention(const Launch& launch, const kernels::DraftAttentionArgs& args) {
  if (args.sequences == 0) return cudaSuccess;
  const bool types = args.q.dtype == kernels::DType::kBF16 && args.block_k.dtype == kernels::DType::kBF16 &&
                     args.block_v.dtype == kernels::DType::kBF16 &&
                     args.pool.dtype == kernels::DType::kBF16 && args.out.dtype == kernels::DType::kBF16;
  const int64_t tiles = (args.block * (args.heads / args.kv_heads) + kRows - 1) / kRows;
  const int64_t items = args.sequences * args.kv_heads * tiles;
  if (!types || args.dim > kMaxDim || args.dim % 4 != 0 || items > kCounters ||
      DraftAttentionWorkspace(args.sequences, args.block, args.heads, args.kv_heads, args.dim) >
          launch.workspace_bytes) {
    return cudaErrorInvalidValue;
  }
  static const cudaError_t prepared =
      cudaFuncSetAttribute(DraftKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (prepared != cudaSuccess) return prepared;
  Params p{args, static_cast<float*>(launch.workspace), launch.counters};
  DraftKernel<<<dim3(static_cast<int>(args.kv_heads * tiles), static_cast<int>(args.sequences), kSplits),
                kThreads, kSharedBytes, launch.stream>>>(p);
  return cudaGetLastError();
}

size_t DraftAttentionWorkspace(int64_t sequences, int64_t block, int64_t heads, int64_t kv_heads,
                               int64_t dim) {
  const int64_t tiles = (block * (heads / kv_heads) + kRows - 1) / kRows;
  return static_cast<size_t>(sequences * kv_heads * tiles) * kSplits * kRows * (dim + 2) * 4;
}

}  // namespace kdt::cuda
