// y = x W^T for at most eight rows and matrices too small for the chip: all inputs of 8 or 16 outputs in one
// block, so that nothing is handed from block to block.
//
// The sums are those of gemm/stream.cuh bit for bit: warp 4 s + k of a block does what warp k along the
// inputs does there for share s of the inputs, and the warps' sums are added in the same order. With eight
// shares a warp does two of these in step. W comes through rings of pieces as there; what is not in the ring
// yet is asked for into L2 before the block waits. x goes straight into registers, kAhead pieces ahead: each
// piece of it is read by one warp of a block only. Where x is made within the kernel (XOfPrevious says how
// that fits in) all of W is in the ring and in registers by then.
#pragma once

#include "kernels/cuda/gemm/stream.cuh"

namespace kdt::cuda {

struct SkinnyGemm;
struct Launch;
// Whether this kernel is the one for a product; then with these parameters.
bool TakesWhole(const Launch& launch, const SkinnyGemm& gemm, StreamParams* params);

inline constexpr int kWholeWarps = 16, kWholeRows = 8;

// 8 kHalves outputs; kEach of the streaming kernel's warps for each warp.
template <int kHalves_, int kEach_, int kDepth_, int kHeld_, int kAhead_>
struct WholeShape {
  static constexpr int kHalves = kHalves_, kEach = kEach_, kDepth = kDepth_, kHeld = kHeld_, kAhead = kAhead_;
  static constexpr int kOuts = 8 * kHalves, kSplits = 4 * kEach, kThreads = 32 * kWholeWarps;
  static constexpr int kPiece = kOuts * 128, kSlot = kEach * kPiece;  // bytes
  static constexpr int kRing = kWholeWarps * kDepth * kSlot;
  static constexpr int kPitch = kOuts + 1;  // floats of a row in the exchange
  static constexpr int kSums = kWholeWarps * kEach * kWholeRows * kPitch * 4;
  static constexpr int kShared = kRing > kSums ? kRing : kSums;
  static_assert(kShared <= 101376 - 256);
};

// Where x comes from: what a block does when it has asked for the ring's pieces of W (Reader's constructor)
// and for all that fits on the chip (Begin, which waits), and how it reads. Here: what the kernel in front
// wrote.
struct XOfPrevious {
  struct Reader {
    __device__ __forceinline__ explicit Reader(const XOfPrevious&) {}
    __device__ __forceinline__ void Begin() { WaitForPrevious(); }
    // Chunk t of four from chunk 4 `four` of a row on.
    __device__ __forceinline__ uint4 Load(const StreamParams& p, int row, int four, int t) const {
      return __ldcg(reinterpret_cast<const uint4*>(p.x + row * p.x_stride) + 4 * four + t);
    }
  };
  static constexpr bool kMayBeLate = false;
};
// With kMayBeLate what Load gives need not be there yet: it is loaded again until a warp's lanes all find
// that it IsThere, or until GivenUp.

template <typename S, typename X>
__global__ void __launch_bounds__(S::kThreads, 1)
    WholeKernel(const __grid_constant__ StreamParams p, const __grid_constant__ X from) {
  constexpr int kDepth = S::kDepth, kHeld = S::kHeld, kAhead = S::kAhead, kEach = S::kEach,
                kHalves = S::kHalves, kOuts = S::kOuts, kOnChip = kDepth + kHeld;
  constexpr bool kStream = !X::kMayBeLate;  // more of W than kOnChip pieces
  constexpr bool kFolds = !kStream && kEach == 1 && kOnChip <= 2 * kAhead;
  extern __shared__ uint4 shared[];
  LaunchDependents();
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int g = lane >> 2, t = lane & 3;
  const int first_tiles = (p.part[0].outs + kOuts - 1) / kOuts, tile = blockIdx.x;
  const StreamPart& part = p.part[tile >= first_tiles];
  const int block_out = (tile - (tile >= first_tiles ? first_tiles : 0)) * kOuts;

  // Pieces first[e] + 4 i, i < count[e].
  const int pieces = (p.chunks + 7) / 8;
  int first[kEach], count[kEach], steps = 0;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int share = warp / 4 + 4 * e;
    first[e] = pieces * share / S::kSplits + warp % 4;
    count[e] = (pieces * (share + 1) / S::kSplits - first[e] + 3) / 4;
    steps = max(steps, count[e]);
  }

  const int line = lane >> 3, chunk = lane & 7;
  const uint32_t at_line = line * 128 + (chunk ^ 4 * (line & 1)) * 16;
  const uint32_t ring = SharedAddress(shared) + warp * kDepth * S::kSlot;
  const int first_w = part.gated ? block_out / 2 : block_out;
  const bf16* const w = part.w + first_w * part.w_stride;
  const auto row_at = [&](int out) {  // of W, from `w` on
    const int row =
        part.gated ? min(out % (kOuts / 2), part.outs / 2 - 1 - first_w) + out / (kOuts / 2) * (part.outs / 2)
                   : min(out, part.outs - 1 - first_w);
    return row * static_cast<int>(part.w_stride);
  };
  int line_at[2 * kHalves];
#pragma unroll
  for (int i = 0; i < 2 * kHalves; ++i) line_at[i] = row_at(4 * i + line);
  const auto fetch = [&](int step, int slot) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (step >= count[e]) continue;
      const bf16* from = w + min((first[e] + 4 * step) * 8 + chunk, p.chunks - 1) * 8;
#pragma unroll
      for (int i = 0; i < 2 * kHalves; ++i)
        CopyAsync16(ring + slot * S::kSlot + e * S::kPiece + i * 512 + at_line, from + line_at[i]);
    }
  };
#pragma unroll
  for (int d = 0; d < kDepth; ++d) {
    if (d < steps) fetch(d, d);
    CopyAsyncCommit();
  }
  typename X::Reader source(from);
  // Pieces kDepth, ..., kDepth + kHeld - 1 go into registers.
  uint4 held[kHeld][kEach][2][kHalves];
#pragma unroll
  for (int h = 0; h < kHeld; ++h) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (kDepth + h >= count[e]) continue;
      const int at = (first[e] + 4 * (kDepth + h)) * 8 + t;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < kHalves; ++i)
          held[h][e][half][i] = LoadStreamed(w + row_at(g + 8 * i) + min(at + 4 * half, p.chunks - 1) * 8);
      }
    }
  }
  if (kStream && lane < kOuts) {
    const bf16* const from = w + row_at(lane);
#pragma unroll 1
    for (int step = kOnChip; step < steps; ++step) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        if (step < count[e]) PrefetchL2(from + (first[e] + 4 * step) * 64);
      }
    }
  }
  source.Begin();

  // Up to four rows where all steps are on the chip: lanes of rows 4 to 7, of whose products nobody wants to
  // know, load what those of rows 0 to 3 need kAhead steps later, so that all of x is on its way at once.
  // When the accumulators have come that far they move over to these lanes' columns.
  const bool folds = kFolds && p.rows <= kWholeRows / 2;
  const int in_row = folds ? g % 4 : g, later = folds && g >= 4 ? kAhead : 0;
  int x_first[kEach], x_count[kEach];
#pragma unroll
  for (int e = 0; e < kEach; ++e)
    x_first[e] = first[e] + 4 * later, x_count[e] = in_row < p.rows ? count[e] - later : 0;
  uint4 in[kAhead][kEach][2] = {};
  const auto load = [&](uint4(&to)[kEach][2], int step) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (step >= x_count[e]) continue;
      const int four = 2 * x_first[e] + 8 * step;
      to[e][0] = source.Load(p, in_row, four, t);
      // A last piece of 32 inputs: what W has there is multiplied with zeros.
      to[e][1] =
          kStream && 4 * four + 4 >= p.chunks ? make_uint4(0, 0, 0, 0) : source.Load(p, in_row, four + 1, t);
    }
  };
  [[maybe_unused]] const auto is_there = [&](const uint4(&of)[kEach][2], int step) {
    bool there = true;
    if constexpr (X::kMayBeLate) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        if (step < x_count[e]) there = there && source.IsThere(of[e][0]) && source.IsThere(of[e][1]);
      }
    }
    return there;
  };
  const auto settle = [&](uint4(&of)[kEach][2], int step) {
    if constexpr (X::kMayBeLate) {
      for (int looks = 0; __any_sync(~0u, !is_there(of, step)) && !source.GivenUp(looks); ++looks)
        load(of, step);
    }
  };
  const auto load_first = [&] {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) load(in[a], a);
  };
  load_first();
  if constexpr (X::kMayBeLate) {
    const auto are_there = [&] {
      bool there = true;
#pragma unroll
      for (int a = 0; a < kAhead; ++a) there = there && is_there(in[a], a);
      return there;
    };
    for (int looks = 0; __any_sync(~0u, !are_there()) && !source.GivenUp(looks); ++looks) load_first();
  }
  float acc[kEach][4] = {};
  const auto multiply = [&](int e, const uint4& low, const uint4& high, const uint4& in_half) {
    const uint32_t even[4] = {low.x, high.x, low.y, high.y}, odd[4] = {low.z, high.z, low.w, high.w};
    MmaBf16(acc[e], even, in_half.x, in_half.y);
    MmaBf16(acc[e], odd, in_half.z, in_half.w);
  };
  const uint4 none = make_uint4(0, 0, 0, 0);
  const uint32_t from_lane = ring + g * 128 + t * 16, swap = 64 * (g & 1);
  // A step with W in the ring; `next` is the one that will find its piece in this slot.
  const auto from_ring = [&](int step, int slot, uint4(&to)[kEach][2], int next) {
    CopyAsyncWaitGroups<kDepth - 1>();
    __syncwarp();
    if (step >= kAhead && !folds) settle(to, step);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        if (step >= count[e]) continue;
        const uint32_t from = from_lane + slot * S::kSlot + e * S::kPiece + ((64 * half) ^ swap);
        multiply(e, LoadShared4U(from), kHalves == 2 ? LoadShared4U(from + 1024) : none, to[e][half]);
      }
    }
    if (!folds) load(to, step + kAhead);
    __syncwarp();
    if (kStream && next < steps) fetch(next, slot);
    CopyAsyncCommit();
  };
#pragma unroll
  for (int step = 0; step < kOnChip; ++step) {
    if (step >= steps) break;
    if (kFolds && folds && step == kAhead) {
#pragma unroll
      for (float& sum : acc[0]) sum = __shfl_xor_sync(~0u, sum, 2);
    }
    if (step < kDepth) {
      from_ring(step, step, in[step % kAhead], step + kOnChip);
      continue;
    }
    if (step >= kAhead && !folds) settle(in[step % kAhead], step);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        if (step >= count[e]) continue;
        const uint4(&w_half)[kHalves] = held[step - kDepth][e][half];
        multiply(e, w_half[0], kHalves == 2 ? w_half[kHalves - 1] : none, in[step % kAhead][e][half]);
      }
    }
    if (!folds) load(in[step % kAhead], step + kAhead);
  }
  int slot = 0;
#pragma unroll 1
  for (int base = kOnChip; kStream && base < steps; base += kAhead) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (base + a >= steps) break;
      from_ring(base + a, slot, in[(kOnChip + a) % kAhead], base + a + kDepth);
      slot = slot + 1 == kDepth ? 0 : slot + 1;
    }
  }

  float* const sums = reinterpret_cast<float*>(shared);
  const int last_lane = kStream ? lane : static_cast<int>(LaneIndex());  // where it is not worth a register
  const int out_of_lane = last_lane >> 2, pair_of_lane = last_lane & 3;
  const int first_row = 2 * (kFolds && folds && steps > kAhead ? pair_of_lane ^ 2 : pair_of_lane);
  __syncthreads();
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
#pragma unroll
    for (int c = 0; c < 2 * kHalves; ++c)
      sums[((warp + kWholeWarps * e) * kWholeRows + first_row + (c & 1)) * S::kPitch + 8 * (c >> 1) +
           out_of_lane] = acc[e][c];
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
    if (row >= p.rows || out >= kOuts / 2 || first_w + out >= part.outs / 2) return;
    const float gate = Rounded<bf16>(sum);
    static_cast<bf16*>(part.y)[row * part.y_stride + first_w + out] =
        FromFloat<bf16>(Silu(gate) * Rounded<bf16>(up));
    return;
  }
  if (row >= p.rows || block_out + out >= part.outs) return;
  const int64_t at = row * part.y_stride + block_out + out;
  if (part.f32) {
    float* const to = static_cast<float*>(part.y) + at;
    *to = p.accumulate ? *to + sum : sum;
  } else {
    bf16* const to = static_cast<bf16*>(part.y) + at;
    *to = FromFloat<bf16>(p.accumulate ? ToFloat(*to) + sum : sum);
  }
}

}  // namespace kdt::cuda
