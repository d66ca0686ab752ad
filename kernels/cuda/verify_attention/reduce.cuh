// Last kernel of verify_attention: merges the partial results of a query tile's splits by log-sum-exp.
//   out = sum_i 2^(m_i - M) O_i / sum_i 2^(m_i - M) l_i,  M = max_i m_i
// A piece of work is 8 rows x 32 columns of a tile (what one warp store of the partial kernel wrote); the
// warps of a block share out the splits. Blocks walk over the pieces of all classes. Launched as a
// programmatic dependent: it plans while the last blocks of the partial kernels run.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/verify_attention/config.cuh"
#include "kernels/cuda/verify_attention/plan.cuh"

namespace kdt::cuda {

inline constexpr int kMaxSplits = 512;
inline constexpr int kAtOnce = 8;  // loads a lane has in flight

// What a block of kReduceWarps warps keeps in shared memory.
template <int kReduceWarps>
struct ReduceShared {
  float weight[8][kMaxSplits + 4];
  float merge[kReduceWarps][8][32];
  float row_top[kReduceWarps][8], row_sum[kReduceWarps][8];
};

// Two values of a partial result: their upper halves, and their third bytes at bits 8 * at of `low`. The
// fourth byte, which is not stored, gets the third's value: as good as any.
__device__ __forceinline__ float2 PartialPair(uint32_t high, uint32_t low, int at) {
  return make_float2(__uint_as_float(__byte_perm(low, high, 0x5400 | at << 4 | at)),
                     __uint_as_float(__byte_perm(low, high, 0x7600 | (at + 1) << 4 | (at + 1))));
}

template <int kReduceWarps>
__device__ void MergePiece(const VerifyParams& p, const VerifyClass& from, const Item& it, int piece,
                           ReduceShared<kReduceWarps>& shared) {
  constexpr int kRounds = kReduceWarps == 16 ? 8 : 4;
  constexpr int kBatch = kRounds * 4 * kReduceWarps;  // splits whose references a block holds in registers
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, t = lane & 3;
  // piece = ((group * 4 + w) * owners + d) * 4 + n4, as the partial kernel stores; groups are of 32 rows at
  // most.
  const int owners = min(4, 1 << (from.tile_shift - 3));
  const int n4 = piece & 3;
  const int d = (piece >> 2) & (owners - 1);
  const int w = (piece >> 2) / owners & 3;
  const int group = (piece >> 2) / owners >> 2;
  const int tile_row = (group * owners + d) * 8 + g;
  const int first_flat = (it.tile << from.tile_shift) + tile_row - g;
  if (first_flat >= it.rows * p.heads) return;  // rows of padding

  // All loads that do not depend on others go out first: references and sums, and the first partials.
  const int64_t item0 = it.first_item + it.tile;
  float2 ml[kRounds];
  auto fetch = [&](int first) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int s = first + (i * kReduceWarps + warp) * 4 + t;
      ml[i] = make_float2(kNoReference, 0.0f);
      if (s < it.splits) {
        const int64_t item = item0 + static_cast<int64_t>(s) * it.tiles;
        ml[i] = __ldcg(from.partial_ml + (item << from.tile_shift) + tile_row);
      }
    }
  };
  float top = kNoReference, sum = 0.0f;
  fetch(0);
  const int64_t first_value = (item0 << (from.tile_shift + 6)) + piece * 32 + lane;
  const uint4* const high = from.partial + first_value;
  const uint2* const low = from.partial_low + first_value;
  const int64_t step = static_cast<int64_t>(it.tiles) << (from.tile_shift + 6);
  uint4 v[kAtOnce];
  uint2 v_low[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int s = warp + i * kReduceWarps;
    v[i] = make_uint4(0, 0, 0, 0), v_low[i] = make_uint2(0, 0);
    if (s < it.splits) v[i] = __ldcg(high + s * step), v_low[i] = __ldcg(low + s * step);
  }
  for (int first = 0;;) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) top = fmaxf(top, ml[i].x);
    if ((first += kBatch) >= it.splits) break;
    fetch(first);
  }
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  if (t == 0) shared.row_top[warp][g] = top;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kReduceWarps; ++i) top = fmaxf(top, shared.row_top[i][g]);
  if (it.splits > kBatch) fetch(0);
  for (int first = 0;;) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const float factor = Exp2(ml[i].x - top);
      sum += factor * ml[i].y;
      const int s = first + (i * kReduceWarps + warp) * 4 + t;
      if (s < it.splits) shared.weight[g][s] = factor;
    }
    if ((first += kBatch) >= it.splits) break;
    fetch(first);
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  if (t == 0) shared.row_sum[warp][g] = sum;
  __syncthreads();

  float acc[8] = {};
  for (int s0 = warp; s0 < it.splits; s0 += kAtOnce * kReduceWarps) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int s = s0 + i * kReduceWarps;
      if (s < it.splits) {
        const float f = shared.weight[g][s];
        const uint32_t pair[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float2 x = PartialPair(pair[k], k < 2 ? v_low[i].x : v_low[i].y, 2 * (k & 1));
          acc[2 * k] += f * x.x;
          acc[2 * k + 1] += f * x.y;
        }
        const int next = s + kAtOnce * kReduceWarps;
        if (next < it.splits) v[i] = __ldcg(high + next * step), v_low[i] = __ldcg(low + next * step);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) shared.merge[warp][k][lane] = acc[k];
  __syncthreads();
  // Warp k writes columns 8 k + 2 t, + 1 of the 32.
  const int flat = first_flat + g;
  if (warp >= 4 || flat >= it.rows * p.heads) return;
  float total = 0.0f, a = 0.0f, b = 0.0f;
#pragma unroll
  for (int i = 0; i < kReduceWarps; ++i) {
    total += shared.row_sum[i][g];
    a += shared.merge[i][2 * warp][lane];
    b += shared.merge[i][2 * warp + 1][lane];
  }
  const float inverse = total > 0.0f || total != total ? 1.0f / total : 0.0f;
  uint16_t* to = p.out + (it.row0 + flat / p.heads) * p.out_stride + (flat % p.heads) * kLatent + 128 * w +
                 (4 * n4 + warp) * 8 + 2 * t;
  *reinterpret_cast<uint32_t*>(to) = PackBf16(a * inverse, b * inverse);
}

// kReduceWarps warps share a tile's splits: 16 for one query tile, 8 for two, 4 where tiles alone fill the
// chip.
template <int kReduceWarps>
__global__ void __launch_bounds__(32 * kReduceWarps)
    VerifyReduce(const __grid_constant__ VerifyParams p, const __grid_constant__ VerifyClasses classes) {
  __shared__ ReduceShared<kReduceWarps> shared;
  LaunchDependents();
  bool waited = false;
  int index = blockIdx.x;
#pragma unroll 1
  for (int i = 0; i < classes.count; ++i) {
    const VerifyClass& from = classes.of[i];
    Planner planner(p, from);
    const int pieces = planner.tiles() << (from.tile_shift + 1);
    for (; index < pieces; index += gridDim.x) {
      const Item it = planner.Find(index >> (from.tile_shift + 1), true);
      if (it.splits == 1) continue;
      if (!waited) WaitForPrevious();
      waited = true;
      __syncthreads();  // the piece before has been written
      MergePiece<kReduceWarps>(p, from, it, index & ((2 << from.tile_shift) - 1), shared);
    }
    index -= pieces;
  }
  // This kernel must not end before the partial kernels have: what comes next in the stream waits for this
  // one only.
  WaitForPrevious();
}

}  // namespace kdt::cuda
