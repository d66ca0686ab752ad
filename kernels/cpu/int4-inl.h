// Dot products of float32 rows with INT4 weight rows (eight inputs a 32-bit word, a bf16 scale for each 32
// inputs). The weights are unpacked in registers, once for all rows of a tile.
//
// A vector of words covers kInt4Block = 8 * kLanes inputs; nibble i of lane l is input 8 l + i. So x is
// stored per block as eight vectors, vector i holding inputs i, 8 + i, 16 + i, ... (PackInt4Row), and lane
// l's scale is that of group l / 4. An output is summed in one fixed order that depends on the number of
// inputs alone.
#if defined(KDT_KERNELS_CPU_INT4_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDT_KERNELS_CPU_INT4_INL_H_
#undef KDT_KERNELS_CPU_INT4_INL_H_
#else
#define KDT_KERNELS_CPU_INT4_INL_H_
#endif

#include "hwy/cache_control.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kdt::kernels::cpu {
namespace HWY_NAMESPACE {

inline constexpr size_t kInt4Block = 8 * kLanes;
inline constexpr size_t kGroupWords = 4;  // 32 inputs
static_assert(kLanes % kGroupWords == 0);

using DU = hn::RebindToUnsigned<DF>;
using VU = hn::Vec<DU>;

inline size_t PackedInt4Size(size_t inputs) { return (inputs + kInt4Block - 1) / kInt4Block * kInt4Block; }

// One block: packed[i * kLanes + l] = x[8 l + i].
HWY_INLINE void PackInt4Block(const float* x, float* packed) {
  const DF d;
  VF low[4], high[4];  // low[i]: inputs i, 4 + i, 8 + i, ... of the first half of the block
  hn::LoadInterleaved4(d, x, low[0], low[1], low[2], low[3]);
  hn::LoadInterleaved4(d, x + 4 * kLanes, high[0], high[1], high[2], high[3]);
  HWY_UNROLL(4)
  for (size_t i = 0; i < 4; ++i) {
    hn::StoreU(hn::ConcatEven(d, high[i], low[i]), d, packed + i * kLanes);
    hn::StoreU(hn::ConcatOdd(d, high[i], low[i]), d, packed + (i + 4) * kLanes);
  }
}

// Short rows: as many weight rows as fit lie in one vector of words. x is repeated to match.
HWY_INLINE bool IsShortInt4(size_t inputs) { return inputs < kInt4Block && kInt4Block % inputs == 0; }

// x[inputs] -> packed[PackedInt4Size(inputs)], zeros behind the end (or x again, see IsShortInt4).
HWY_INLINE void PackInt4Row(const float* x, size_t inputs, float* packed) {
  size_t i = 0;
  for (; i + kInt4Block <= inputs; i += kInt4Block) PackInt4Block(x + i, packed + i);
  if (i == inputs) return;
  HWY_ALIGN float padded[kInt4Block] = {};
  const size_t copies = IsShortInt4(inputs) ? kInt4Block / inputs : 1;
  for (size_t copy = 0; copy < copies; ++copy) {
    std::memcpy(padded + copy * inputs, x + i, (inputs - i) * sizeof(float));
  }
  PackInt4Block(padded, packed + i);
}

// The weights q of nibble kPlace (0, 1, 2) of each word, as float32, exactly. The nibble where it stands
// becomes the low end of a float's mantissa, 2^(23 - 4 kPlace) + stored value; subtracting the power of two
// and the stored offset 8 leaves q. AVX-512 looks the lowest nibble up in a register instead, which spares
// the mask: it reads four bits of an index.
template <size_t kPlace>
HWY_INLINE VF Int4Nibble(VU words) {
  const DF d;
  const DU du;
  static_assert(kPlace < 3);
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  if constexpr (kPlace == 0) {
    HWY_ALIGN static constexpr float kWeights[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    const VU index = HWY_IS_DEBUG_BUILD ? hn::And(words, hn::Set(du, 15u)) : words;
    return hn::TableLookupLanes(hn::Load(d, kWeights), hn::IndicesFromVec(d, index));
  }
#endif
  const VU magic = hn::Set(du, static_cast<uint32_t>(127 + 23 - 4 * kPlace) << 23);
  const VU mask = hn::Set(du, uint32_t{15} << (4 * kPlace));
  const VF offset = hn::Set(d, static_cast<float>((uint32_t{1} << (23 - 4 * kPlace)) + 8));
  return hn::Sub(hn::BitCast(d, hn::OrAnd(magic, words, mask)), offset);
}

// Lane l gets scales[l / 4]: each block of 16 bytes takes its two bytes, as the upper half of a float.
HWY_INLINE VF Int4Scales(const uint16_t* scales) {
  const DF d;
  const hn::Repartition<uint64_t, DF> d64;
  const hn::Repartition<uint8_t, DF> d8;
  HWY_ALIGN static constexpr uint8_t kBytes[64] = {
      0x80, 0x80, 0, 1, 0x80, 0x80, 0, 1, 0x80, 0x80, 0, 1, 0x80, 0x80, 0, 1,  //
      0x80, 0x80, 2, 3, 0x80, 0x80, 2, 3, 0x80, 0x80, 2, 3, 0x80, 0x80, 2, 3,  //
      0x80, 0x80, 4, 5, 0x80, 0x80, 4, 5, 0x80, 0x80, 4, 5, 0x80, 0x80, 4, 5,  //
      0x80, 0x80, 6, 7, 0x80, 0x80, 6, 7, 0x80, 0x80, 6, 7, 0x80, 0x80, 6, 7};
  static_assert(kLanes <= 16);
  uint64_t bits = 0;
  std::memcpy(&bits, scales, kLanes / kGroupWords * sizeof(uint16_t));
  const auto all = hn::BitCast(d8, hn::Set(d64, bits));
  return hn::BitCast(d, hn::TableLookupBytesOr0(all, hn::Load(d8, kBytes)));
}

// part[r][o] = fma(x[r], nibble kNibble of word row o, part[r][o]). The words are shifted as the nibbles are
// used up.
template <size_t kNibble, size_t R, size_t O>
HWY_INLINE void Int4NibbleStep(const float* const (&x)[R], VU (&words)[O], VF (&part)[R][O]) {
  const DF d;
  VF xs[R];
  HWY_UNROLL(8)
  for (size_t r = 0; r < R; ++r) xs[r] = hn::LoadU(d, x[r] + kNibble * kLanes);
  HWY_UNROLL(8)
  for (size_t o = 0; o < O; ++o) {
    if (kNibble != 0 && kNibble % 3 == 0) words[o] = hn::ShiftRight<12>(words[o]);
    const VF weight = Int4Nibble<kNibble % 3>(words[o]);
    HWY_UNROLL(8)
    for (size_t r = 0; r < R; ++r) {
      part[r][o] = kNibble == 0 ? hn::Mul(xs[r], weight) : hn::MulAdd(xs[r], weight, part[r][o]);
    }
  }
}

// sums[r][o] += x[r] . w[o] over one block. Word rows lie w_stride apart, scale rows scale_stride.
template <size_t R, size_t O>
HWY_INLINE void Int4Step(const float* const (&x)[R], const uint32_t* w, size_t w_stride,
                         const uint16_t* scales, size_t scale_stride, VF (&sums)[R][O]) {
  const DU du;
  VU words[O];
  VF part[R][O];
  HWY_UNROLL(8)
  for (size_t o = 0; o < O; ++o) words[o] = hn::LoadU(du, w + o * w_stride);
  Int4NibbleStep<0>(x, words, part);
  Int4NibbleStep<1>(x, words, part);
  Int4NibbleStep<2>(x, words, part);
  Int4NibbleStep<3>(x, words, part);
  Int4NibbleStep<4>(x, words, part);
  Int4NibbleStep<5>(x, words, part);
  Int4NibbleStep<6>(x, words, part);
  Int4NibbleStep<7>(x, words, part);
  HWY_UNROLL(8)
  for (size_t o = 0; o < O; ++o) {
    const VF scale = Int4Scales(scales + o * scale_stride);
    HWY_UNROLL(8)
    for (size_t r = 0; r < R; ++r) sums[r][o] = hn::MulAdd(part[r][o], scale, sums[r][o]);
  }
}

// out[r * out_stride + o] = x[r] . w[o] for an R x O tile, O a multiple of 4. x is packed. Prefetches the
// words at `ahead`.
template <size_t R, size_t O>
HWY_INLINE void Int4Tile(const float* const* x, const uint32_t* w, const uint16_t* scales, size_t inputs,
                         float* out, size_t out_stride, const uint32_t* ahead) {
  const DF d;
  const size_t w_stride = inputs / 8, scale_stride = inputs / 32;
  VF sums[R][O];
  const float* xs[R];
  HWY_UNROLL(8)
  for (size_t r = 0; r < R; ++r) {
    xs[r] = x[r];
    HWY_UNROLL(8)
    for (size_t o = 0; o < O; ++o) sums[r][o] = hn::Zero(d);
  }
  size_t i = 0;
  for (; i + kInt4Block <= inputs; i += kInt4Block) {
    Int4Step<R, O>(xs, w + i / 8, w_stride, scales + i / 32, scale_stride, sums);
    HWY_UNROLL(8)
    for (size_t o = 0; o < O; ++o) hwy::Prefetch(ahead + o * w_stride + i / 8);
    HWY_UNROLL(8)
    for (size_t r = 0; r < R; ++r) xs[r] += kInt4Block;
  }
  if (i < inputs) {
    // Zero words stand for q = -8, but meet a zero in x and a zero scale.
    HWY_ALIGN uint32_t tail_w[O * kLanes] = {};
    uint16_t tail_scales[O * (kLanes / kGroupWords)] = {};
    for (size_t o = 0; o < O; ++o) {
      std::memcpy(tail_w + o * kLanes, w + o * w_stride + i / 8, (inputs - i) / 8 * sizeof(uint32_t));
      std::memcpy(tail_scales + o * (kLanes / kGroupWords), scales + o * scale_stride + i / 32,
                  (inputs - i) / 32 * sizeof(uint16_t));
    }
    Int4Step<R, O>(xs, tail_w, kLanes, tail_scales, kLanes / kGroupWords, sums);
  }
  HWY_UNROLL(8)
  for (size_t r = 0; r < R; ++r) {
    HWY_UNROLL(8)
    for (size_t o = 0; o < O; o += 4) {
      const auto four = SumLanes4(d, sums[r][o], sums[r][o + 1], sums[r][o + 2], sums[r][o + 3]);
      hn::StoreU(four, D4(), out + r * out_stride + o);
    }
  }
}

inline constexpr size_t kInt4Outs = 8;  // outputs a call of Int4Dots

// Int4Tile for kInt4Outs short rows of weights: they lie in V vectors of words behind each other, each output
// in a few neighbouring blocks of four lanes.
template <size_t R, size_t V>
HWY_INLINE void Int4ShortTile(const float* const* x, const uint32_t* w, const uint16_t* scales, float* out,
                              size_t out_stride) {
  static_assert(V <= 4);
  const DF d;
  constexpr size_t kOutsEach = kInt4Outs / V, kBlocksEach = kLanes / 4 / kOutsEach;
  VF sums[R][4];
  VF parts[R][V];
  const float* xs[R];
  HWY_UNROLL(8)
  for (size_t r = 0; r < R; ++r) {
    xs[r] = x[r];
    HWY_UNROLL(8)
    for (size_t v = 0; v < V; ++v) parts[r][v] = hn::Zero(d);
  }
  Int4Step<R, V>(xs, w, kLanes, scales, kLanes / kGroupWords, parts);
  HWY_UNROLL(8)
  for (size_t r = 0; r < R; ++r) {
    HWY_UNROLL(8)
    for (size_t v = 0; v < 4; ++v) sums[r][v] = v < V ? parts[r][v % V] : hn::Zero(d);
    HWY_ALIGN float blocks[kLanes];
    hn::Store(SumBlocks4(d, sums[r][0], sums[r][1], sums[r][2], sums[r][3]), d, blocks);
    for (size_t o = 0; o < kInt4Outs; ++o) {
      const float* block = blocks + o / kOutsEach + o % kOutsEach * kBlocksEach * 4;
      float sum = block[0];
      for (size_t b = 1; b < kBlocksEach; ++b) sum += block[4 * b];
      out[r * out_stride + o] = sum;
    }
  }
}

// Not inlined: the tiles are large, and a call is nothing beside one.
template <size_t R>
HWY_NOINLINE void Int4Rows(const float* const* x, const uint32_t* w, const uint16_t* scales, size_t inputs,
                           float* out, size_t out_stride, const uint32_t* ahead) {
  if (IsShortInt4(inputs)) {
    if (inputs * kInt4Outs == 2 * kInt4Block) return Int4ShortTile<R, 2>(x, w, scales, out, out_stride);
    if (inputs * kInt4Outs == 4 * kInt4Block) return Int4ShortTile<R, 4>(x, w, scales, out, out_stride);
  }
  if constexpr (kManyRegisters && R == 1) {
    return Int4Tile<1, kInt4Outs>(x, w, scales, inputs, out, out_stride, ahead);
  }
  for (size_t o = 0; o < kInt4Outs; o += 4) {
    const size_t words = o * (inputs / 8);
    Int4Tile<R, 4>(x, w + words, scales + o * (inputs / 32), inputs, out + o, out_stride, ahead + words);
  }
}

// out[r * out_stride + o] = x[r] . w[o] for any number of rows and kInt4Outs consecutive weight rows.
// `ahead`: as many weight rows that are needed soon, or w.
HWY_INLINE void Int4Dots(const float* const* x, size_t rows, const uint32_t* w, const uint16_t* scales,
                         size_t inputs, float* out, size_t out_stride, const uint32_t* ahead) {
  size_t r = 0;
  for (; kManyRegisters && r + 2 <= rows; r += 2) {
    Int4Rows<2>(x + r, w, scales, inputs, out + r * out_stride, out_stride, r == 0 ? ahead : w);
  }
  for (; r < rows; ++r) {
    Int4Rows<1>(x + r, w, scales, inputs, out + r * out_stride, out_stride, r == 0 ? ahead : w);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kdt::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // KDT_KERNELS_CPU_INT4_INL_H_
