// y = x W^T for at most eight rows and matrices too small for the chip: all inputs of 8 or 16 outputs in one
// block, so that nothing is handed from block to block.
//
// The sums are those of gemm/stream.cuh bit for bit: warp 4 s + k of a block does what warp k along the
// inputs does there for share s of the inputs, and the warps' sums are added in the same order. With eight
// shares a warp does two of these in step. W comes through rings of pieces as there; what is not in the ring
// yet is asked for into L2 before the block waits. x goes straight into registers, kAhead pieces ahead: each
// piece of it is read by one warp of a block only.
#pragma once

#include "kernels/cuda/gemm/stream.cuh"

namespace kdt::cuda {

struct SkinnyGemm;
struct Launch;
// Whether this kernel is the one for a product; then with these parameters.
bool TakesWhole(const Launch& launch, const SkinnyGemm& gemm, StreamParams* params);

inline constexpr int kWholeWarps = 16, kWholeRows = 8;

// 8 kHalves outputs; kEach of the streaming kernel's warps for each warp.
// kDepth steps of a warp in the ring and kHeld in registers: the latter are the warp's first ones with
// kHeldFirst.
template <int kHalves_, int kEach_, int kDepth_, int kHeld_, int kAhead_, bool kHeldFirst_ = false>
struct WholeShape {
  static constexpr bool kHeldFirst = kHeldFirst_;
  static constexpr int kHalves = kHalves_, kEach = kEach_, kDepth = kDepth_, kHeld = kHeld_, kAhead = kAhead_;
  static constexpr int kInRing = kHeldFirst_ ? kHeld : 0,
                       kInRegisters = kHeldFirst_ ? 0 : kDepth;  // from step .. on
  static constexpr int kOuts = 8 * kHalves, kSplits = 4 * kEach, kThreads = 32 * kWholeWarps;
  static constexpr int kPiece = kOuts * 128, kSlot = kEach * kPiece;  // bytes
  static constexpr int kRing = kWholeWarps * kDepth * kSlot;
  static constexpr int kPitch = kOuts + 1;  // floats of a row in the exchange
  static constexpr int kSums = kWholeWarps * kEach * kWholeRows * kPitch * 4;
  static constexpr int kShared = kRing > kSums ? kRing : kSums;
  static_assert(kShared <= 101376 - 256);
};

// What a block of such a kernel has: its outputs, a warp's pieces of W (steps 0, 1, ..., of each of kEach
// shares) on the chip, and the sums.
template <typename S>
class WholeBlock {
 public:
  static constexpr int kEach = S::kEach, kHalves = S::kHalves, kDepth = S::kDepth;
  static constexpr int kOnChip = kDepth + S::kHeld;  // steps whose pieces of W are in the ring or held

  __device__ __forceinline__ WholeBlock(const StreamParams& params, uint4* shared)
      : p(params),
        lane(threadIdx.x & 31),
        warp(__shfl_sync(~0u, threadIdx.x >> 5, 0)),
        tile_(p, static_cast<int>(blockIdx.x)),
        w_(tile_.part.w + tile_.first_w * tile_.part.w_stride),
        shared_(shared),
        ring_(SharedAddress(shared) + warp * kDepth * S::kSlot) {
    // Pieces first[e] + 4 i, i < count[e].
    const int pieces = (p.chunks + 7) / 8;
    steps = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int share = warp / 4 + 4 * e;
      first[e] = pieces * share / S::kSplits + warp % 4;
      count[e] = (pieces * (share + 1) / S::kSplits - first[e] + 3) / 4;
      steps = max(steps, count[e]);
    }
#pragma unroll
    for (int i = 0; i < 2 * kHalves; ++i) line_at_[i] = RowAt(4 * i + (lane >> 3));
  }

  __device__ __forceinline__ void Fetch(int step, int slot) const {
    const int line = lane >> 3, chunk = lane & 7;
    const uint32_t at_line = line * 128 + (chunk ^ 4 * (line & 1)) * 16;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (step >= count[e]) continue;
      const bf16* from = w_ + min((first[e] + 4 * step) * 8 + chunk, p.chunks - 1) * 8;
#pragma unroll
      for (int i = 0; i < 2 * kHalves; ++i)
        CopyAsync16(ring_ + slot * S::kSlot + e * S::kPiece + i * 512 + at_line, from + line_at_[i]);
    }
  }
  // All that fits on the chip: this, then Hold (held steps kBegin to kEnd - 1). With `paced` a warp asks for
  // a step when it has the one before, so that not all of W stands in front of what others read.
  __device__ __forceinline__ void FillRing(bool paced = false) const {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      if (S::kInRing + d < steps) Fetch(S::kInRing + d, d);
      CopyAsyncCommit();
      if (paced) CopyAsyncWaitGroups<0>();
    }
  }
  template <int kBegin = 0, int kEnd = S::kHeld>
  __device__ __forceinline__ void Hold(bool paced = false) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int h = kBegin; h < kEnd; ++h) {
      if (paced && h > 0) WaitForLoad(held_[h > 0 ? h - 1 : 0][0][1][kHalves - 1].x);
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        if (S::kInRegisters + h >= count[e]) continue;
        const int at = (first[e] + 4 * (S::kInRegisters + h)) * 8 + t;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int i = 0; i < kHalves; ++i)
            held_[h][e][half][i] = LoadStreamed(w_ + RowAt(g + 8 * i) + min(at + 4 * half, p.chunks - 1) * 8);
        }
      }
    }
  }
  // Pieces from step `begin` on into L2.
  __device__ __forceinline__ void Prefetch(int begin) const {
    if (lane >= S::kOuts) return;
    const bf16* const from = w_ + RowAt(lane);
#pragma unroll 1
    for (int step = begin; step < steps; ++step) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        if (step < count[e]) PrefetchL2(from + (first[e] + 4 * step) * 64);
      }
    }
  }

  // A step whose pieces of W are in a slot of the ring, which may be filled again behind a __syncwarp(), or
  // held. x(e, half): lane (g, t)'s inputs 8 t, ..., 8 t + 7 of half a piece of row g.
  template <typename X>
  __device__ __forceinline__ void MultiplyRing(int step, int slot, const X& x) {
    const uint32_t g = lane >> 2, t = lane & 3, from_lane = ring_ + g * 128 + t * 16, swap = 64 * (g & 1);
    CopyAsyncWaitGroups<kDepth - 1>();
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        if (step >= count[e]) continue;
        const uint32_t from = from_lane + slot * S::kSlot + e * S::kPiece + ((64 * half) ^ swap);
        Multiply(e, LoadShared4U(from), kHalves == 2 ? LoadShared4U(from + 1024) : make_uint4(0, 0, 0, 0),
                 x(e, half));
      }
    }
  }
  template <typename X>
  __device__ __forceinline__ void MultiplyHeld(int step, const X& x) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        if (step >= count[e]) continue;
        const uint4(&w)[kHalves] = held_[step - S::kInRegisters][e][half];
        Multiply(e, w[0], kHalves == 2 ? w[kHalves - 1] : make_uint4(0, 0, 0, 0), x(e, half));
      }
    }
  }

  // y from all warps' sums. row_of(e, c): the row of acc[e][c], kWholeRows or more: nobody's.
  template <typename RowOf>
  __device__ __forceinline__ void Finish(const RowOf& row_of) {
    constexpr int kOuts = S::kOuts;
    const Tile tile(p, BlockIndex());  // once more: the products' registers are full
    const StreamPart& part = tile.part;
    float* const sums = reinterpret_cast<float*>(shared_);
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
#pragma unroll
      for (int c = 0; c < 2 * kHalves; ++c) {
        const unsigned row = row_of(e, c);
        if (row < kWholeRows) {
          sums[((warp + kWholeWarps * e) * kWholeRows + row) * S::kPitch + 8 * (c >> 1) +
               (S::kHeldFirst ? static_cast<int>(LaneIndex()) : lane) / 4] = acc[e][c];
        }
      }
    }
    __syncthreads();
    if (threadIdx.x >= kWholeRows * kOuts) return;
    const int row = threadIdx.x / kOuts, out = threadIdx.x % kOuts;
    float sum = 0.0f;
#pragma unroll
    for (int share = 0; share < S::kSplits; ++share) {
      const float* const from = sums + (4 * share * kWholeRows + row) * S::kPitch + out;
      float part_sum = from[0];
#pragma unroll
      for (int k = 1; k < 4; ++k) part_sum += from[k * kWholeRows * S::kPitch];
      sum = share == 0 ? part_sum : sum + part_sum;
    }
    if (part.gated) {
      const float up = __shfl_xor_sync(~0u, sum, kOuts / 2);
      if (row >= p.rows || out >= kOuts / 2 || tile.first_w + out >= part.outs / 2) return;
      const float gate = Rounded<bf16>(sum);
      static_cast<bf16*>(part.y)[row * part.y_stride + tile.first_w + out] =
          FromFloat<bf16>(Silu(gate) * Rounded<bf16>(up));
      return;
    }
    if (row >= p.rows || tile.first_out + out >= part.outs) return;
    StoreOut(part, p.accumulate, row * part.y_stride + tile.first_out + out, sum);
  }

  const StreamParams& p;
  const int lane, warp;
  int first[kEach], count[kEach], steps;
  float acc[kEach][4] = {};

 private:
  // A block's outputs.
  struct Tile {
    __device__ __forceinline__ Tile(const StreamParams& p, int tile)
        : first_tiles((p.part[0].outs + S::kOuts - 1) / S::kOuts),
          part(p.part[tile >= first_tiles]),
          first_out((tile - (tile >= first_tiles ? first_tiles : 0)) * S::kOuts),
          first_w(part.gated ? first_out / 2 : first_out) {}
    const int first_tiles;
    const StreamPart& part;
    const int first_out, first_w;  // from here on, in y and in W
  };
  // Of W, from w_ on.
  __device__ __forceinline__ int RowAt(int out) const {
    const StreamPart& part = tile_.part;
    const int row = part.gated ? min(out % (S::kOuts / 2), part.outs / 2 - 1 - tile_.first_w) +
                                     out / (S::kOuts / 2) * (part.outs / 2)
                               : min(out, part.outs - 1 - tile_.first_w);
    return row * static_cast<int>(part.w_stride);
  }
  __device__ __forceinline__ void Multiply(int e, const uint4& low, const uint4& high, const uint4& x) {
    AddFirst(acc[e], low, high, x);
    AddSecond(acc[e], low, high, x);
  }

  const Tile tile_;
  const bf16* const w_;
  uint4* const shared_;
  const uint32_t ring_;
  int line_at_[2 * kHalves];
  uint4 held_[S::kHeld][kEach][2][kHalves];
};

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1) WholeKernel(const __grid_constant__ StreamParams p) {
  constexpr int kDepth = S::kDepth, kAhead = S::kAhead, kEach = S::kEach, kOnChip = WholeBlock<S>::kOnChip;
  extern __shared__ uint4 shared[];
  LaunchDependents();
  WholeBlock<S> block(p, shared);
  block.FillRing();
  block.Hold();
  block.Prefetch(kOnChip);
  WaitForPrevious();

  const int g = block.lane >> 2, t = block.lane & 3;
  const bf16* const x = p.x + min(g, p.rows - 1) * p.x_stride + 8 * t;
  uint4 in[kAhead][kEach][2];
  const auto load = [&](uint4(&to)[kEach][2], int step) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (step >= block.count[e]) continue;
      const int piece = block.first[e] + 4 * step;
      to[e][0] = __ldcg(reinterpret_cast<const uint4*>(x + piece * 64));
      // A last piece of 32 inputs: what W has there is multiplied with zeros.
      to[e][1] = piece * 8 + 4 < p.chunks ? __ldcg(reinterpret_cast<const uint4*>(x + piece * 64 + 32))
                                          : make_uint4(0, 0, 0, 0);
    }
  };
#pragma unroll
  for (int a = 0; a < kAhead; ++a) load(in[a], a);
  // A step with W in the ring; `next` is the one that will find its piece in this slot.
  const auto from_ring = [&](int step, int slot, uint4(&x_step)[kEach][2], int next) {
    block.MultiplyRing(step, slot, [&](int e, int half) -> const uint4& { return x_step[e][half]; });
    load(x_step, step + kAhead);
    __syncwarp();
    if (next < block.steps) block.Fetch(next, slot);
    CopyAsyncCommit();
  };
#pragma unroll
  for (int step = 0; step < kOnChip; ++step) {
    if (step >= block.steps) break;
    uint4(&x_step)[kEach][2] = in[step % kAhead];
    if (step < kDepth) {
      from_ring(step, step, x_step, step + kOnChip);
    } else {
      block.MultiplyHeld(step, [&](int e, int half) -> const uint4& { return x_step[e][half]; });
      load(x_step, step + kAhead);
    }
  }
  int slot = 0;
#pragma unroll 1
  for (int base = kOnChip; base < block.steps; base += kAhead) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (base + a >= block.steps) break;
      from_ring(base + a, slot, in[(kOnChip + a) % kAhead], base + a + kDepth);
      slot = slot + 1 == kDepth ? 0 : slot + 1;
    }
  }
  block.Finish([&](int, int c) { return 2 * t + (c & 1); });
}

}  // namespace kdt::cuda
