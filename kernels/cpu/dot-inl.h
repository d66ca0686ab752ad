// Dot products of float32 rows with bf16 weight rows, the core of every dense projection.
//
// An output is summed in one fixed order: kLanes running sums, each over its own inputs by rising index, then
// over the lanes. The order depends on the number of inputs alone, never on how many rows or outputs share a
// tile.
//
// Two bf16 weights lie in each 32-bit word; unpacking the low and the high halves gives the even and the odd
// inputs of a block of 2 * kLanes. So x is split that way once per call (PackRow) and no weight is ever
// shuffled.
#if defined(KDT_KERNELS_CPU_DOT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDT_KERNELS_CPU_DOT_INL_H_
#undef KDT_KERNELS_CPU_DOT_INL_H_
#else
#define KDT_KERNELS_CPU_DOT_INL_H_
#endif

#include <type_traits>

#include "hwy/cache_control.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kdt::kernels::cpu {
namespace HWY_NAMESPACE {

inline constexpr size_t kDotBlock = 2 * kLanes;  // inputs a step
inline constexpr size_t kTileRows = kManyRegisters ? 4 : 2;
inline constexpr size_t kTileOuts = 8;

inline size_t PackedSize(size_t inputs) { return (inputs + kDotBlock - 1) / kDotBlock * kDotBlock; }

// x[inputs] -> packed[PackedSize(inputs)]: each block's even inputs, then its odd ones, zeros behind the end.
HWY_INLINE void PackRow(const float* x, size_t inputs, float* packed) {
  const DF d;
  size_t i = 0;
  for (; i + kDotBlock <= inputs; i += kDotBlock) {
    VF even, odd;
    hn::LoadInterleaved2(d, x + i, even, odd);
    hn::Store(even, d, packed + i);
    hn::Store(odd, d, packed + i + kLanes);
  }
  if (i == inputs) return;
  for (size_t j = 0; j < kDotBlock; ++j) {
    packed[i + j / 2 + (j % 2) * kLanes] = i + j < inputs ? x[i + j] : 0.0f;
  }
}

// One step of a tile: sums[r][o] += x[r] . w[o] over one block.
template <size_t R, size_t O>
HWY_INLINE void DotStep(const float* x, size_t x_stride, const uint16_t* w, size_t w_stride,
                        VF (&sums)[R][O]) {
  const DF d;
  const hn::RebindToUnsigned<DF> d32;
  const hn::Repartition<uint16_t, DF> d16;
  VF xs[R];
  HWY_UNROLL(8)
  for (size_t r = 0; r < R; ++r) xs[r] = hn::Load(d, x + r * x_stride);
  HWY_UNROLL(8)
  for (size_t o = 0; o < O; ++o) {
    const auto pair = hn::BitCast(d32, hn::LoadU(d16, w + o * w_stride));
    const VF even = hn::BitCast(d, hn::ShiftLeft<16>(pair));
    HWY_UNROLL(8)
    for (size_t r = 0; r < R; ++r) sums[r][o] = hn::MulAdd(xs[r], even, sums[r][o]);
  }
  HWY_UNROLL(8)
  for (size_t r = 0; r < R; ++r) xs[r] = hn::Load(d, x + r * x_stride + kLanes);
  const auto high = hn::Set(d32, 0xffff0000u);
  HWY_UNROLL(8)
  for (size_t o = 0; o < O; ++o) {
    const auto pair = hn::BitCast(d32, hn::LoadU(d16, w + o * w_stride));
    const VF odd = hn::BitCast(d, hn::And(pair, high));
    HWY_UNROLL(8)
    for (size_t r = 0; r < R; ++r) sums[r][o] = hn::MulAdd(xs[r], odd, sums[r][o]);
  }
}

// y[r, o] = (accumulate ? y[r, o] : 0) + x[r] . w[o] for an R x O tile. x is packed. Prefetches the tile of
// weights at `ahead`: several short rows at a time are more streams than the processor follows by itself.
template <size_t R, size_t O>
HWY_INLINE void DotTile(const float* x, size_t x_stride, const uint16_t* w, size_t w_stride, size_t inputs,
                        float* y, size_t y_stride, bool accumulate, const uint16_t* ahead) {
  const DF d;
  VF sums[R][O];
  HWY_UNROLL(8)
  for (size_t r = 0; r < R; ++r) {
    HWY_UNROLL(8)
    for (size_t o = 0; o < O; ++o) sums[r][o] = hn::Zero(d);
  }
  size_t i = 0;
  for (; i + kDotBlock <= inputs; i += kDotBlock) {
    DotStep<R, O>(x + i, x_stride, w + i, w_stride, sums);
    HWY_UNROLL(8)
    for (size_t o = 0; o < O; ++o) hwy::Prefetch(ahead + o * w_stride + i);
  }
  if (i < inputs) {
    HWY_ALIGN uint16_t tail[O * kDotBlock] = {};
    for (size_t o = 0; o < O; ++o) {
      std::memcpy(tail + o * kDotBlock, w + o * w_stride + i, (inputs - i) * sizeof(uint16_t));
    }
    DotStep<R, O>(x + i, x_stride, tail, kDotBlock, sums);
  }
  HWY_UNROLL(8)
  for (size_t r = 0; r < R; ++r) {
    float* out = y + r * y_stride;
    if constexpr (O % 4 == 0) {
      const D4 d4;
      HWY_UNROLL(8)
      for (size_t o = 0; o < O; o += 4) {
        const auto four = SumLanes4(d, sums[r][o], sums[r][o + 1], sums[r][o + 2], sums[r][o + 3]);
        hn::StoreU(accumulate ? hn::Add(hn::LoadU(d4, out + o), four) : four, d4, out + o);
      }
    } else {
      HWY_UNROLL(8)
      for (size_t o = 0; o < O; ++o) {
        const float sum = SumLanes(d, sums[r][o]);
        out[o] = accumulate ? out[o] + sum : sum;
      }
    }
  }
}

// Not inlined: the tiles are large, and a call is nothing beside one.
template <size_t R>
HWY_NOINLINE void DotRows(const float* x, size_t x_stride, const uint16_t* w, size_t w_stride, size_t inputs,
                          size_t outs, float* y, size_t y_stride, bool accumulate, const uint16_t* ahead) {
  if (outs == kTileOuts) {
    // One row needs many outputs to keep the multipliers busy; several rows need registers for their own
    // inputs.
    constexpr size_t kOuts = R == 1 ? kTileOuts : 4;
    for (size_t o = 0; o < kTileOuts; o += kOuts) {
      const size_t at = o * w_stride;
      DotTile<R, kOuts>(x, x_stride, w + at, w_stride, inputs, y + o, y_stride, accumulate, ahead + at);
    }
    return;
  }
  for (size_t o = 0; o < outs; ++o) {
    const uint16_t* row = w + o * w_stride;
    DotTile<R, 1>(x, x_stride, row, w_stride, inputs, y + o, y_stride, accumulate, row);
  }
}

inline constexpr size_t kPrefetchBytes = 16384;  // covers the latency of the last-level cache

// y[r, o] (+)= x[r] . w[o] for all rows and outputs: each tile of weights is read once and used for all rows.
// `next`: weights of the same shape that the caller needs next, or nullptr.
inline void DotAll(const float* x, size_t x_stride, size_t rows, const uint16_t* w, size_t w_stride,
                   size_t inputs, size_t outs, float* y, size_t y_stride, bool accumulate,
                   const uint16_t* next = nullptr) {
  const size_t tiles_ahead = kPrefetchBytes / (kTileOuts * inputs * sizeof(uint16_t) + 1) + 1;
  const size_t rounded = (outs + kTileOuts - 1) / kTileOuts * kTileOuts;
  for (size_t o = 0; o < outs; o += kTileOuts) {
    const size_t tile = outs - o < kTileOuts ? outs - o : kTileOuts;
    const uint16_t* tile_w = w + o * w_stride;
    const uint16_t* ahead = tile_w;  // where there is nothing to fetch: what is in the nearest cache already
    if (const size_t target = o + tiles_ahead * kTileOuts; target + kTileOuts <= outs) {
      ahead = w + target * w_stride;
    } else if (next != nullptr && target >= rounded && target - rounded + kTileOuts <= outs) {
      ahead = next + (target - rounded) * w_stride;
    }
    const auto tile_rows = [&](auto count, size_t r) HWY_ATTR {
      DotRows<count()>(x + r * x_stride, x_stride, tile_w, w_stride, inputs, tile, y + r * y_stride + o,
                       y_stride, accumulate, r == 0 ? ahead : tile_w);
    };
    size_t r = 0;
    for (; r + kTileRows <= rows; r += kTileRows) tile_rows(std::integral_constant<size_t, kTileRows>(), r);
    for (; r + 2 <= rows; r += 2) tile_rows(std::integral_constant<size_t, 2>(), r);
    for (; r < rows; ++r) tile_rows(std::integral_constant<size_t, 1>(), r);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kdt::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // KDT_KERNELS_CPU_DOT_INL_H_
