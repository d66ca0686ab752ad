// Dot products of float32 rows with INT4 weight rows (eight inputs a 32-bit word, a bf16 scale for each 32
// inputs). The weights are unpacked in registers, once for all rows of a call.
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

#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kdt::kernels::cpu {
namespace HWY_NAMESPACE {

inline constexpr size_t kInt4Block = 8 * kLanes;
inline constexpr size_t kGroupWords = 4;  // 32 inputs
static_assert(kLanes % kGroupWords == 0);

inline size_t PackedInt4Size(size_t inputs) { return (inputs + kInt4Block - 1) / kInt4Block * kInt4Block; }

// x[inputs] -> packed[PackedInt4Size(inputs)], zeros behind the end; inputs is a multiple of 32.
HWY_INLINE void PackInt4Row(const float* x, size_t inputs, float* packed) {
  for (size_t block = 0; block < inputs; block += kInt4Block) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      for (size_t i = 0; i < 8; ++i) {
        const size_t from = block + 8 * lane + i;
        packed[block + i * kLanes + lane] = from < inputs ? x[from] : 0.0f;
      }
    }
  }
}

// The weights q of nibble kNibble in each word, as float32.
template <int kNibble>
HWY_INLINE VF Int4Nibble(hn::Vec<hn::RebindToUnsigned<DF>> words) {
  const DF d;
  const hn::RebindToSigned<DF> di;
  const auto nibble = hn::And(hn::ShiftRight<4 * kNibble>(words), hn::Set(hn::RebindToUnsigned<DF>(), 15u));
  return hn::ConvertTo(d, hn::Sub(hn::BitCast(di, nibble), hn::Set(di, 8)));
}

// Lane l gets scales[l / 4].
HWY_INLINE VF Int4Scales(const uint16_t* scales) {
  const DF d;
  const hn::RebindToUnsigned<DF> d32;
  HWY_ALIGN uint32_t bits[kLanes];
  for (size_t lane = 0; lane < kLanes; ++lane)
    bits[lane] = static_cast<uint32_t>(scales[lane / kGroupWords]) << 16;
  return hn::BitCast(d, hn::Load(d32, bits));
}

// sums[r] += x[r] . w over one block.
template <size_t R>
HWY_INLINE void Int4Step(const float* const* x, size_t offset, const uint32_t* w, const uint16_t* scales,
                         VF (&sums)[R]) {
  const DF d;
  const auto words = hn::LoadU(hn::RebindToUnsigned<DF>(), w);
  const VF weights[8] = {Int4Nibble<0>(words), Int4Nibble<1>(words), Int4Nibble<2>(words),
                         Int4Nibble<3>(words), Int4Nibble<4>(words), Int4Nibble<5>(words),
                         Int4Nibble<6>(words), Int4Nibble<7>(words)};
  const VF scale = Int4Scales(scales);
  HWY_UNROLL(8)
  for (size_t r = 0; r < R; ++r) {
    const float* row = x[r] + offset;
    VF sum = hn::Mul(hn::Load(d, row), weights[0]);
    HWY_UNROLL(8)
    for (size_t i = 1; i < 8; ++i) sum = hn::MulAdd(hn::Load(d, row + i * kLanes), weights[i], sum);
    sums[r] = hn::MulAdd(sum, scale, sums[r]);
  }
}

// out[r] = x[r] . w for R packed rows; w one weight row of `inputs` inputs.
template <size_t R>
HWY_INLINE void Int4Dot(const float* const* x, const uint32_t* w, const uint16_t* scales, size_t inputs,
                        float* out) {
  const DF d;
  VF sums[R];
  HWY_UNROLL(8)
  for (size_t r = 0; r < R; ++r) sums[r] = hn::Zero(d);
  size_t i = 0;
  for (; i + kInt4Block <= inputs; i += kInt4Block) Int4Step<R>(x, i, w + i / 8, scales + i / 32, sums);
  if (i < inputs) {
    // Zero words stand for q = -8, but meet a zero in x and a zero scale.
    HWY_ALIGN uint32_t tail_w[kLanes] = {};
    uint16_t tail_scales[kLanes / kGroupWords] = {};
    std::memcpy(tail_w, w + i / 8, (inputs - i) / 8 * sizeof(uint32_t));
    std::memcpy(tail_scales, scales + i / 32, (inputs - i) / 32 * sizeof(uint16_t));
    Int4Step<R>(x, i, tail_w, tail_scales, sums);
  }
  HWY_UNROLL(8)
  for (size_t r = 0; r < R; ++r) out[r] = SumLanes(d, sums[r]);
}

inline constexpr size_t kInt4Rows = kManyRegisters ? 8 : 4;

// out[r] = x[r] . w for any number of rows.
HWY_INLINE void Int4DotRows(const float* const* x, size_t rows, const uint32_t* w, const uint16_t* scales,
                            size_t inputs, float* out) {
  size_t r = 0;
  for (; r + kInt4Rows <= rows; r += kInt4Rows) Int4Dot<kInt4Rows>(x + r, w, scales, inputs, out + r);
  for (; r + 2 <= rows; r += 2) Int4Dot<2>(x + r, w, scales, inputs, out + r);
  for (; r < rows; ++r) Int4Dot<1>(x + r, w, scales, inputs, out + r);
}

}  // namespace HWY_NAMESPACE
}  // namespace kdt::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // KDT_KERNELS_CPU_INT4_INL_H_
