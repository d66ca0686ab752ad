// Second kernel of verify_attention: merges the partial results of a query tile's splits by log-sum-exp.
//   out = sum_i 2^(m_i - M) O_i / sum_i 2^(m_i - M) l_i,  M = max_i m_i
// A block takes 8 rows x 32 columns of a tile (what one warp store of the partial kernel wrote); its warps
// share out the splits. Launched as a programmatic dependent: it plans while the partial kernel's last blocks
// run.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/verify_attention/config.cuh"
#include "kernels/cuda/verify_attention/plan.cuh"

namespace kdt::cuda {

inline constexpr int kMaxSplits = 512;
inline constexpr int kAtOnce = 8;  // loads a lane has in flight

// kReduceWarps warps share a tile's splits: 16 for one query tile, 8 for two, 4 where tiles alone fill the
// chip.
template <class C, int kReduceWarps>
__global__ void __launch_bounds__(32 * kReduceWarps) VerifyReduce(const __grid_constant__ VerifyParams p) {
  constexpr int kPieces = C::kTileRows * 2;  // blocks a tile
  constexpr int kRounds = kReduceWarps == 16 ? 8 : 4;
  constexpr int kBatch = kRounds * 4 * kReduceWarps;  // splits whose references a block holds in registers
  __shared__ float weight[8][kMaxSplits + 4];
  __shared__ float merge[kReduceWarps][8][32];
  __shared__ float row_top[kReduceWarps][8], row_sum[kReduceWarps][8];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, t = lane & 3;
  const int piece = blockIdx.x % kPieces;
  const Item it = Planner<C::kTileRows>(p).Find(blockIdx.x / kPieces, true);
  // piece = ((group * 4 + w) * owners + d) * 4 + n4, as the partial kernel stores
  const int n4 = piece & 3;
  const int d = (piece >> 2) % C::kOwners;
  const int w = (piece >> 2) / C::kOwners & 3;
  const int group = (piece >> 2) / C::kOwners >> 2;
  const int tile_row = group * C::kGroupRows + 8 * d + g;
  if (it.sequence < 0 || it.splits == 1) {
    // Blocks with nothing to merge need not wait, but this kernel must not end before the partial kernel has:
    // what comes next in the stream waits for this one only.
    if (blockIdx.x == 0) WaitForPrevious();
    return;
  }
  const int first_flat = it.tile * C::kTileRows + tile_row - g;
  if (first_flat >= it.rows * p.heads) return;  // rows of padding
  WaitForPrevious();

  // All loads that do not depend on others go out first: references, sums and scales, and the first partials.
  const int64_t item0 = it.first_item + it.tile;
  float2 ml[kRounds];
  float scale[kRounds];
  auto fetch = [&](int first) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int s = first + (i * kReduceWarps + warp) * 4 + t;
      ml[i] = make_float2(kNoReference, 0.0f);
      scale[i] = 0.0f;
      if (s < it.splits) {
        const int64_t row = (item0 + static_cast<int64_t>(s) * it.tiles) * C::kTileRows + tile_row;
        ml[i] = __ldcg(p.partial_ml + row);
        scale[i] = __ldcg(p.partial_scale + row * 4 + w);
      }
    }
  };
  float top = kNoReference, sum = 0.0f;
  fetch(0);
  const uint4* from = p.partial + item0 * C::kTileRows * 64 + piece * 32 + lane;
  const int64_t step = static_cast<int64_t>(it.tiles) * C::kTileRows * 64;
  uint4 v[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int s = warp + i * kReduceWarps;
    v[i] = s < it.splits ? __ldcg(from + s * step) : make_uint4(0, 0, 0, 0);
  }
  for (int first = 0;;) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) top = fmaxf(top, ml[i].x);
    if ((first += kBatch) >= it.splits) break;
    fetch(first);
  }
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  if (t == 0) row_top[warp][g] = top;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kReduceWarps; ++i) top = fmaxf(top, row_top[i][g]);
  if (it.splits > kBatch) fetch(0);
  for (int first = 0;;) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const float factor = Exp2(ml[i].x - top);
      sum += factor * ml[i].y;
      const int s = first + (i * kReduceWarps + warp) * 4 + t;
      if (s < it.splits) weight[g][s] = factor * scale[i];
    }
    if ((first += kBatch) >= it.splits) break;
    fetch(first);
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  if (t == 0) row_sum[warp][g] = sum;
  __syncthreads();

  float acc[8] = {};
  for (int s0 = warp; s0 < it.splits; s0 += kAtOnce * kReduceWarps) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int s = s0 + i * kReduceWarps;
      if (s < it.splits) {
        const float f = weight[g][s];
        const uint32_t pair[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&pair[k]));
          acc[2 * k] += f * x.x;
          acc[2 * k + 1] += f * x.y;
        }
        const int next = s + kAtOnce * kReduceWarps;
        if (next < it.splits) v[i] = __ldcg(from + next * step);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) merge[warp][k][lane] = acc[k];
  __syncthreads();
  if (warp >= 4) return;
  // Warp k writes columns 8 k + 2 t, + 1 of the 32.
  const int flat = first_flat + g;
  if (flat >= it.rows * p.heads) return;
  float total = 0.0f, a = 0.0f, b = 0.0f;
#pragma unroll
  for (int i = 0; i < kReduceWarps; ++i) {
    total += row_sum[i][g];
    a += merge[i][2 * warp][lane];
    b += merge[i][2 * warp + 1][lane];
  }
  const float inverse = total > 0.0f || total != total ? 1.0f / total : 0.0f;
  uint16_t* to = p.out + (it.row0 + flat / p.heads) * p.out_stride + (flat % p.heads) * kLatent + 128 * w +
                 (4 * n4 + warp) * 8 + 2 * t;
  *reinterpret_cast<uint32_t*>(to) = PackBf16(a * inverse, b * inverse);
}

}  // namespace kdt::cuda
