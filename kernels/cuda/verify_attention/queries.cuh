// Queries into the score warps' registers.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/verify_attention/plan.cuh"

namespace kdt::cuda {

// The queries of score warp `warp` (group = warp / 2, half of the columns = warp % 2) as A fragments; the
// rope part of all goes to shared memory. Rows come in 64 columns at a time, with 16-byte loads.
// fragment_row(m): the row, within the group, of a lane's ldmatrix address in row tile m.
template <class C, class FragmentRow>
__device__ __forceinline__ void LoadQueries(const VerifyParams& p, const Item& it, uint32_t base, int warp,
                                            FragmentRow&& fragment_row, uint32_t (&q)[C::kMTiles][16][4]) {
  constexpr int kMTiles = C::kMTiles;
  const int lane = threadIdx.x & 31;
  const int group = warp >> 1, half = warp & 1;
  const int first_flat = it.tile * C::kTileRows + group * C::kGroupRows;
  const int flat_rows = it.rows * p.heads;
  const uint32_t staging = base + C::kStagingAt + warp * C::kStagingParts * C::kStagingPiece;
  constexpr int kLoads = kMTiles * 4;  // a lane's 16-byte loads for 64 columns
  uint4 in[4][kLoads];
  int src[kLoads];  // elements from p.q, negative: no such row
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int flat = first_flat + i * 4 + (lane >> 3);
    const int row = RowOf(p, flat);
    src[i] = flat < flat_rows ? (it.row0 + row) * static_cast<int>(p.q_stride) +
                                    (flat - row * p.heads) * kKeyWidth + (lane & 7) * 8
                              : -kKeyWidth;
  }
  auto fetch = [&](int column, uint4(&to)[kLoads]) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      to[i] = src[i] >= 0 ? *reinterpret_cast<const uint4*>(p.q + src[i] + column) : make_uint4(0, 0, 0, 0);
    }
  };
  auto put = [&](uint32_t to, const uint4(&from)[kLoads]) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int row = i * 4 + (lane >> 3);
      StoreShared4U(to + row * 128 + (((lane & 7) ^ (row & 7)) << 4), from[i]);
    }
  };
  // Everything is on its way before anything is needed: a part's registers become its fragments'.
  if (half == 0) {
    const uint32_t to = base + C::kQueryRopeAt + group * C::kQueryRopeStep;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int row = i * 4 + (lane >> 3);
      const uint32_t at = to + row * 128 + (((lane & 7) ^ (row & 7)) << 4);
      if (src[i] >= 0) {
        CopyAsync16(at, p.q + src[i] + kLatent);
      } else {
        StoreShared4U(at, make_uint4(0, 0, 0, 0));
      }
    }
  }
#pragma unroll
  for (int part = 0; part < 4; ++part) fetch(half * 256 + part * 64, in[part]);
#pragma unroll
  for (int first = 0; first < 4; first += C::kStagingParts) {
    if (first > 0) __syncwarp();
#pragma unroll
    for (int i = 0; i < C::kStagingParts; ++i) put(staging + i * C::kStagingPiece, in[first + i]);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < C::kStagingParts; ++i) {
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int row = fragment_row(m);
          LoadMatrix4(q[m][(first + i) * 4 + k], staging + i * C::kStagingPiece + row * 128 +
                                                     (((2 * k + (lane >> 4)) ^ (row & 7)) << 4));
        }
      }
    }
  }
  CopyAsyncWait();
  NamedBarrier(C::kQueryBarrier, 32 * C::kScoreWarps);  // the rope part is shared
}

}  // namespace kdt::cuda
