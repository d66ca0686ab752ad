// Last kernel of verify_attention: merges the partial results of a query tile's splits by log-sum-exp.
//   out = sum_i 2^(m_i - M) O_i / sum_i 2^(m_i - M) l_i,  M = max_i m_i
// A piece of work is up to 8 rows x 32 columns of a tile (what one warp store of the partial kernel wrote, or
// part of it); the warps of a block share out the splits. Launched as a programmatic dependent: it plans
// while the last blocks of the partial kernels run.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/verify_attention/config.cuh"
#include "kernels/cuda/verify_attention/plan.cuh"

namespace kdt::cuda {

inline constexpr int kMaxSplits = 512;
// Splits a lane has in flight at most: a chip's worth of them over the warps and their parts, or less.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
template <class S>
inline constexpr int kAtOnce = S::kLean         ? 5
                               : S::kParts == 1 ? 9
                                                : 6;
#else
template <class S>
inline constexpr int kAtOnce = S::kLean ? 5 : 9;
#endif

// How a block merges: kWarps warps share a piece's splits; a piece is 8 / kParts rows x 32 columns, so that
// few rows occupy many multiprocessors, and a warp takes kParts splits at a time. With kLean a block leaves a
// quarter of the registers, so that blocks of the kernel behind settle down beside it.
template <int kWarps_, int kParts_, bool kLean_>
struct ReduceShape {
  static constexpr int kWarps = kWarps_, kParts = kParts_;
  static constexpr bool kLean = kLean_;
  static constexpr int kBlocks = 16 / kWarps;                       // a multiprocessor holds at once
  static constexpr int kBound = 32 * kWarps * (kLean ? 5 : 4) / 4;  // threads with as many registers
  static constexpr int kLanes = 32 / kParts;                        // that hold a piece: a row in four
};
template <class S>
struct ReduceShared {
  float merge[S::kWarps][8][S::kLanes];
  float row_top[S::kWarps][8], row_sum[S::kWarps][8];
};

// Two values of a partial result: their upper halves, and their third bytes at bits 8 * at of `low`. The
// fourth byte, which is not stored, gets the third's value: as good as any.
__device__ __forceinline__ float2 PartialPair(uint32_t high, uint32_t low, int at) {
  return make_float2(__uint_as_float(__byte_perm(low, high, 0x5400 | at << 4 | at)),
                     __uint_as_float(__byte_perm(low, high, 0x7600 | (at + 1) << 4 | (at + 1))));
}

// What one thread has of a sum over splits: eight values of one row, relative to the largest reference it has
// met.
struct MergedSplits {
  float top = kNoReference, sum = 0.0f, acc[8] = {};

  // Adds the splits s0, s0 + kStride, ... below `splits`, kCount at most, all loads first.
  template <int kCount, int kStride>
  __device__ __forceinline__ void Add(const float2* ml_from, int64_t ml_step, const uint4* high,
                                      const uint2* low, int64_t step, int s0, int splits) {
    float2 ml[kCount];
    uint4 v[kCount];
    uint2 v_low[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int s = s0 + i * kStride;
      ml[i] = make_float2(kNoReference, 0.0f);
      v[i] = make_uint4(0, 0, 0, 0), v_low[i] = make_uint2(0, 0);
      if (s >= splits) continue;
      ml[i] = __ldcg(ml_from + s * ml_step);
      v[i] = __ldcg(high + s * step);
      v_low[i] = __ldcg(low + s * step);
    }
    float next = top;
#pragma unroll
    for (int i = 0; i < kCount; ++i) next = fmaxf(next, ml[i].x);
    const float before = Exp2(top - next);
    top = next;
    sum *= before;
#pragma unroll
    for (int k = 0; k < 8; ++k) acc[k] *= before;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float f = Exp2(ml[i].x - top);
      sum += f * ml[i].y;
      const uint32_t pair[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 x = PartialPair(pair[k], k < 2 ? v_low[i].x : v_low[i].y, 2 * (k & 1));
        acc[2 * k] += f * x.x;
        acc[2 * k + 1] += f * x.y;
      }
    }
  }
  // Adds what the lane `other` away has of the same values.
  __device__ __forceinline__ void AddLane(int other) {
    const float next = fmaxf(top, __shfl_xor_sync(~0u, top, other));
    const float before = Exp2(top - next);
    top = next;
    sum *= before;
    sum += __shfl_xor_sync(~0u, sum, other);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      acc[k] *= before;
      acc[k] += __shfl_xor_sync(~0u, acc[k], other);
    }
  }
};

// Each warp merges the splits it takes relative to the largest reference among them, the block merges the
// warps: all loads of a warp are independent, and the block meets once.
template <class S>
__device__ void MergePiece(const VerifyParams& p, const VerifyClass& from, const Item& it, int piece,
                           ReduceShared<S>& shared, bool& waited) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int l = lane % S::kLanes;
  // piece / kParts = ((group * 4 + w) * owners + d) * 4 + n4, as the partial kernel stores; groups are of 32
  // rows at most.
  const int g = piece % S::kParts * (8 / S::kParts) + (l >> 2), t = l & 3;
  piece /= S::kParts;
  const int tile_shift = from.tile_shift - it.narrow;
  const int owners_shift = it.narrow ? 1 : min(2, tile_shift - 3);
  const int n4 = piece & 3;
  const int d = (piece >> 2) & ((1 << owners_shift) - 1);
  const int w = (piece >> 2 >> owners_shift) & 3;
  const int group = piece >> 4 >> owners_shift;
  const int tile_row = (((group << owners_shift) + d) << 3) + g;
  const int flat = (it.tile << tile_shift) + tile_row;
  if (flat - (l >> 2) >= it.rows * p.heads) return;  // rows of padding, for all lanes

  const int64_t item0 = it.first_item + it.tile;
  const float2* const ml_from = from.partial_ml + (item0 << tile_shift) + tile_row;
  const int64_t first_value = (item0 << (tile_shift + 6)) + piece * 32 + g * 4 + t;
  const int64_t step = static_cast<int64_t>(it.tiles) << (tile_shift + 6);
  const int64_t ml_step = static_cast<int64_t>(it.tiles) << tile_shift;
  if (!waited) WaitForPrevious();  // with all addresses known
  waited = true;
  MergedSplits merged;
  constexpr int kStride = S::kWarps * S::kParts;
#pragma unroll 1
  for (int s = warp * S::kParts + lane / S::kLanes; s < it.splits; s += kAtOnce<S> * kStride)
    merged.Add<kAtOnce<S>, kStride>(ml_from, ml_step, from.partial + first_value,
                                    from.partial_low + first_value, step, s, it.splits);
  __syncwarp();
#pragma unroll
  for (int other = S::kLanes; other < 32; other *= 2) merged.AddLane(other);
  if (lane < S::kLanes) {
#pragma unroll
    for (int k = 0; k < 8; ++k) shared.merge[warp][k][l] = merged.acc[k];
    if (t == 0) {
      shared.row_top[warp][l >> 2] = merged.top;
      shared.row_sum[warp][l >> 2] = merged.sum;
    }
  }
  __syncthreads();
  // Four threads for each lane of the piece: the k-th writes columns 8 k + 2 t, + 1 of the 32.
  const int k = threadIdx.x / S::kLanes;
  if (k >= 4 || flat >= it.rows * p.heads) return;
  float top = kNoReference;
#pragma unroll
  for (int i = 0; i < S::kWarps; ++i) top = fmaxf(top, shared.row_top[i][l >> 2]);
  float total = 0.0f, a = 0.0f, b = 0.0f;
#pragma unroll
  for (int i = 0; i < S::kWarps; ++i) {
    const float f = Exp2(shared.row_top[i][l >> 2] - top);
    total += f * shared.row_sum[i][l >> 2];
    a += f * shared.merge[i][2 * k][l];
    b += f * shared.merge[i][2 * k + 1][l];
  }
  const float inverse = total > 0.0f || total != total ? 1.0f / total : 0.0f;
  const int row = RowOf(p, flat);
  uint16_t* to = p.out + (it.row0 + row) * p.out_stride + (flat - row * p.heads) * kLatent + 128 * w +
                 (4 * n4 + k) * 8 + 2 * t;
  *reinterpret_cast<uint32_t*>(to) = PackBf16(a * inverse, b * inverse);
}

// Blocks walk over the pieces of all classes.
template <class S>
__global__ void __launch_bounds__(S::kBound, S::kBlocks)
    VerifyReduce(const __grid_constant__ VerifyParams p, const __grid_constant__ VerifyClasses classes) {
  __shared__ ReduceShared<S> shared;
  LaunchDependents();
  bool waited = false;
  int index = blockIdx.x;
#pragma unroll 1
  for (int i = 0; i < classes.count; ++i) {
    const VerifyClass& from = classes.of[i];
    Planner planner(p, from);
    const int tile_pieces = S::kParts * 2 << (from.tile_shift - planner.narrow());
    const int pieces = planner.tiles() * tile_pieces;
    for (; index < pieces; index += gridDim.x) {
      const Item it = planner.Find(index / tile_pieces, true);
      if (it.splits == 1) continue;
      const int piece = index & (tile_pieces - 1);
      __syncthreads();  // the piece before has been written
      MergePiece<S>(p, from, it, piece, shared, waited);
    }
    index -= pieces;
  }
  // This kernel must not end before the partial kernels have: what comes next in the stream waits for this
  // one only.
  WaitForPrevious();
}

}  // namespace kdt::cuda
