// The shared experts' down product as a part of moe, up to eight rows: eight warps take a tile of 32 hidden
// rows. The weights are constants and wait in registers, and the products are made while the experts' first
// weights are on their way. The bits are those of gemm/stream.cuh: a warp takes a piece of 64 inputs for 16
// outputs, and the pieces are added up in order.
#pragma once

#include "kernels/cuda/moe/schedule.cuh"

namespace kdt::cuda {

inline constexpr int kSharedPieces = 4, kSharedPiece = 64;
static_assert(kDirectTeam == 2 * kSharedPieces && kTileRows == 32);

// A tile's sums, in pieces.
using SharedSums = float[kSharedPieces][8][kTileRows];

class SharedDown {
 public:
  __device__ __forceinline__ SharedDown(const MoeParams& p, int tile, int warp, int lane)
      : p_(p),
        piece_(warp % kSharedPieces),
        out_(tile * kTileRows + warp % kDirectTeam / kSharedPieces * 16),
        lane_(lane),
        there_(piece_ < p.shared_pieces && tile < p.down_tiles) {}

  __device__ __forceinline__ void LoadWeights() {
    if (!there_) return;
    const bf16* const from = p_.shared_w + (out_ + lane_ / 4) * p_.shared_w_stride + At();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      w_[half][0] = LoadStreamed(from + 32 * half);
      w_[half][1] = LoadStreamed(from + 8 * p_.shared_w_stride + 32 * half);
    }
  }
  // Behind the wait for the kernel in front.
  __device__ __forceinline__ void LoadInputs() {
    if (!there_) return;
    const bf16* const from = p_.shared_x + min(lane_ / 4, p_.rows - 1) * p_.shared_x_stride + At();
#pragma unroll
    for (int half = 0; half < 2; ++half) x_[half] = __ldcg(reinterpret_cast<const uint4*>(from + 32 * half));
  }
  __device__ __forceinline__ void Multiply(SharedSums& sums) const {
    float acc[4] = {};
    if (there_) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 &low = w_[half][0], &high = w_[half][1];
        const uint32_t even[4] = {low.x, high.x, low.y, high.y}, odd[4] = {low.z, high.z, low.w, high.w};
        MmaBf16(acc, even, x_[half].x, x_[half].y);
        MmaBf16(acc, odd, x_[half].z, x_[half].w);
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c)
      sums[piece_][2 * (lane_ % 4) + c % 2][out_ % kTileRows + c / 2 * 8 + lane_ / 4] = acc[c];
  }

 private:
  __device__ __forceinline__ int At() const { return piece_ * kSharedPiece + 8 * (lane_ % 4); }

  const MoeParams& p_;
  const int piece_, out_, lane_;
  const bool there_;
  uint4 w_[2][2], x_[2];
};

}  // namespace kdt::cuda
