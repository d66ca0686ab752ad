// verify_attention by the plainest means, float32 throughout: what validate mode holds the fast kernel
// against. A block takes one row, up to eight of its heads and one of `splits` parts of its keys, 64 keys at
// a time: scores, softmax, sums, with block-wide barriers between; a second kernel merges the parts. Nothing
// is shared with the fast kernels.
#include <algorithm>

#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeads = 8;  // a block's, one a warp in the softmax
constexpr int kKeys = 64;
constexpr int kMaxLatent = 1024, kMaxRope = 128;
constexpr int kMaxParts = 64;
constexpr int kPairs = kMaxLatent / 2 / kThreads;  // of output columns a thread owns

struct Params {
  kernels::VerifyAttentionArgs args;
  int row0;        // first row of this launch
  int parts;       // of the keys
  float* partial;  // [rows of the launch][heads][parts][latent + 2]: output, reference, sum
};

// The sequence of a row, or -1 for padding.
__device__ int SequenceOf(const kernels::VerifyAttentionArgs& a, int row) {
  for (int s = 0; s < a.sequences; ++s) {
    if (row >= a.row_begin[s] && row < a.row_begin[s + 1]) return s;
  }
  return -1;
}

__global__ void __launch_bounds__(kThreads, 2) PartKernel(const __grid_constant__ Params p) {
  const kernels::VerifyAttentionArgs& a = p.args;
  extern __shared__ float queries[];  // [kHeads][width]
  __shared__ float scores[kKeys][kHeads];
  __shared__ float factors[kHeads];
  __shared__ int slots[kKeys];  // negative: not visible
  const int latent = static_cast<int>(a.latent), width = static_cast<int>(a.latent + a.rope);
  const int row = p.row0 + blockIdx.x, part = blockIdx.y, head0 = blockIdx.z * kHeads;
  const int heads = min(kHeads, static_cast<int>(a.heads) - head0);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int sequence = SequenceOf(a, row);
  if (sequence < 0) return;
  const int first_row = a.row_begin[sequence], context = a.context_length[sequence];
  const int length = context + a.row_begin[sequence + 1] - first_row;
  const int begin = static_cast<int>(static_cast<int64_t>(length) * part / p.parts);
  const int end = static_cast<int>(static_cast<int64_t>(length) * (part + 1) / p.parts);
  const bf16* pool = static_cast<const bf16*>(a.pool.data);
  const bf16* q = static_cast<const bf16*>(a.q.data) + row * a.q.stride + static_cast<int64_t>(head0) * width;
  for (int i = threadIdx.x; i < kHeads * width; i += kThreads) {
    queries[i] = i < heads * width ? ToFloat(q[i]) * a.scale : 0.0f;
  }
  float out[kPairs][kHeads][2] = {};
  float reference = -INFINITY, sum = 0.0f;  // of head `warp`
  for (int key0 = begin; key0 < end; key0 += kKeys) {
    __syncthreads();
    if (threadIdx.x < kKeys) {
      const int key = key0 + threadIdx.x, node = key - context;
      bool visible = key < end;
      if (visible && node >= 0) {
        visible = a.causal[sequence] != 0
                      ? node <= row - first_row
                      : (a.ancestor_bits[static_cast<int64_t>(row) * kernels::kAncestorWords + node / 64] >>
                             (node % 64) &
                         1) != 0;
      }
      slots[threadIdx.x] = visible ? a.slot_table[sequence * a.table_stride + key] : -1;
    }
    __syncthreads();
    for (int k = warp; k < kKeys; k += kThreads / 32) {
      float dot[kHeads] = {};
      const int64_t slot = slots[k];
      if (slot >= 0) {
        for (int c = 2 * lane; c < width; c += 64) {
          const float2 key =
              __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(pool + slot * a.pool.stride + c));
#pragma unroll
          for (int h = 0; h < kHeads; ++h) {
            const float2 x = *reinterpret_cast<const float2*>(queries + h * width + c);
            dot[h] = fmaf(x.x, key.x, fmaf(x.y, key.y, dot[h]));
          }
        }
      }
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float score = WarpSum(dot[h]);
        if (lane == h) scores[k][h] = slot >= 0 ? score : -INFINITY;
      }
    }
    __syncthreads();
    {
      const float low = scores[lane][warp], high = scores[lane + 32][warp];
      float top = fmaxf(low, high);
#pragma unroll
      for (int d = 16; d > 0; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
      top = fmaxf(top, reference);
      // Without a visible key so far there is nothing to subtract.
      const float base = top == -INFINITY ? 0.0f : top;
      const float factor = expf(reference - base);
      const float p0 = expf(low - base), p1 = expf(high - base);
      scores[lane][warp] = p0;
      scores[lane + 32][warp] = p1;
      sum = sum * factor + WarpSum(p0 + p1);
      reference = top;
      if (lane == 0) factors[warp] = factor;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int c = 2 * (threadIdx.x + i * kThreads);
      if (c >= latent) continue;
#pragma unroll
      for (int h = 0; h < kHeads; ++h) out[i][h][0] *= factors[h], out[i][h][1] *= factors[h];
      for (int k = 0; k < kKeys; ++k) {
        const int64_t slot = slots[k];
        if (slot < 0) continue;
        const float2 value =
            __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(pool + slot * a.pool.stride + c));
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          const float weight = scores[k][h];
          out[i][h][0] = fmaf(weight, value.x, out[i][h][0]);
          out[i][h][1] = fmaf(weight, value.y, out[i][h][1]);
        }
      }
    }
  }
  const auto partial_of = [&](int h) {
    return p.partial +
           ((static_cast<int64_t>(blockIdx.x) * a.heads + head0 + h) * p.parts + part) * (latent + 2);
  };
  for (int h = 0; h < heads; ++h) {
    float* const to = partial_of(h);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int c = 2 * (threadIdx.x + i * kThreads);
      if (c < latent) *reinterpret_cast<float2*>(to + c) = make_float2(out[i][h][0], out[i][h][1]);
    }
  }
  if (warp < heads && lane == 0) {
    partial_of(warp)[latent] = reference;
    partial_of(warp)[latent + 1] = sum;
  }
}

__global__ void __launch_bounds__(kThreads) MergeKernel(const __grid_constant__ Params p) {
  const kernels::VerifyAttentionArgs& a = p.args;
  const int latent = static_cast<int>(a.latent), row = p.row0 + blockIdx.x, head = blockIdx.y;
  if (SequenceOf(a, row) < 0) return;
  const float* from =
      p.partial + (static_cast<int64_t>(blockIdx.x) * a.heads + head) * p.parts * (latent + 2);
  float top = -INFINITY, sum = 0.0f;
  for (int i = 0; i < p.parts; ++i) {
    const float reference = from[i * (latent + 2) + latent];
    top = reference != reference ? reference : fmaxf(top, reference);
  }
  float factor[kMaxParts];
  for (int i = 0; i < p.parts; ++i) {
    const float reference = from[i * (latent + 2) + latent];
    factor[i] = reference == -INFINITY ? 0.0f : expf(reference - top);
    sum += factor[i] * from[i * (latent + 2) + latent + 1];
  }
  bf16* const to = static_cast<bf16*>(a.out.data) + row * a.out.stride + static_cast<int64_t>(head) * latent;
  for (int c = threadIdx.x; c < latent; c += kThreads) {
    float total = 0.0f;
    for (int i = 0; i < p.parts; ++i) total = fmaf(factor[i], from[i * (latent + 2) + c], total);
    to[c] = FromFloat<bf16>(sum == 0.0f ? 0.0f : total / sum);
  }
}

}  // namespace

cudaError_t VerifyAttentionReference(const Launch& launch, const kernels::VerifyAttentionArgs& args) {
  if (args.q.rows == 0 || args.sequences == 0 || args.heads == 0) return cudaSuccess;
  const bool fits = args.latent % 2 == 0 && args.rope % 2 == 0 && args.latent >= 2 &&
                    args.latent <= kMaxLatent && args.rope >= 0 && args.rope <= kMaxRope &&
                    args.q.dtype == kernels::DType::kBF16 && args.pool.dtype == kernels::DType::kBF16 &&
                    args.out.dtype == kernels::DType::kBF16 && args.pool.stride % 2 == 0;
  if (!fits) return cudaErrorInvalidValue;
  constexpr int kSharedBytes = kHeads * (kMaxLatent + kMaxRope) * 4;
  static_assert(kSharedBytes + 4096 <= 48 * 1024);  // what a block has without asking
  const int64_t head_groups = (args.heads + kHeads - 1) / kHeads;
  // Enough parts to fill the chip, and as many rows at once as the workspace has room for.
  const int64_t parts =
      std::clamp<int64_t>(int64_t{8} * launch.processors / (args.q.rows * head_groups), 1, kMaxParts);
  const int64_t row_bytes = args.heads * parts * (args.latent + 2) * 4;
  const int64_t rows_at_once = std::min<int64_t>(launch.workspace_bytes / row_bytes, args.q.rows);
  if (rows_at_once == 0) return cudaErrorInvalidValue;
  for (int64_t row = 0; row < args.q.rows; row += rows_at_once) {
    const auto rows = static_cast<unsigned>(std::min(rows_at_once, args.q.rows - row));
    const Params p{args, static_cast<int>(row), static_cast<int>(parts),
                   static_cast<float*>(launch.workspace)};
    PartKernel<<<dim3(rows, static_cast<unsigned>(parts), static_cast<unsigned>(head_groups)), kThreads,
                 kHeads*(args.latent + args.rope) * 4, launch.stream>>>(p);
    MergeKernel<<<dim3(rows, static_cast<unsigned>(args.heads)), kThreads, 0, launch.stream>>>(p);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace kdt::cuda
