// The absorbed query and value projections of latent attention.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/mla_absorb.cc"
#include <algorithm>
#include <cstring>

#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/dot-inl.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu/rope_rows.h"

HWY_BEFORE_NAMESPACE();
namespace kdt::kernels::cpu {
namespace HWY_NAMESPACE {

inline constexpr size_t kAbsorbRows = kManyRegisters ? 3 : 1;
inline constexpr size_t kAbsorbBlocks = 4;  // blocks of kDotBlock columns a tile

// out[r, c] = sum over i of q[r, i] w[i, c], i rising, for R rows and C blocks of kDotBlock columns. Even and
// odd columns are summed apart, as they come out of the packed pairs. The last block may hold only `last`
// columns.
template <size_t R, size_t C>
HWY_INLINE void AbsorbTile(const float* q, size_t q_stride, const uint16_t* w, size_t w_stride, size_t inputs,
                           float* out, size_t out_stride, size_t last) {
  const DF d;
  const hn::RebindToUnsigned<DF> d32;
  const hn::Repartition<uint16_t, DF> d16;
  const auto high = hn::Set(d32, 0xffff0000u);
  VF even[R][C], odd[R][C];
  HWY_UNROLL(8)
  for (size_t r = 0; r < R; ++r) {
    HWY_UNROLL(8)
    for (size_t c = 0; c < C; ++c) even[r][c] = odd[r][c] = hn::Zero(d);
  }
  HWY_ALIGN uint16_t padded[kDotBlock] = {};
  for (size_t i = 0; i < inputs; ++i) {
    HWY_UNROLL(8)
    for (size_t c = 0; c < C; ++c) {
      const uint16_t* from = w + i * w_stride + c * kDotBlock;
      if (C == 1 && last < kDotBlock) {
        std::memcpy(padded, from, last * sizeof(uint16_t));
        from = padded;
      }
      const auto pair = hn::BitCast(d32, hn::LoadU(d16, from));
      const VF even_w = hn::BitCast(d, hn::ShiftLeft<16>(pair));
      const VF odd_w = hn::BitCast(d, hn::And(pair, high));
      HWY_UNROLL(8)
      for (size_t r = 0; r < R; ++r) {
        const VF x = hn::Set(d, q[r * q_stride + i]);
        even[r][c] = hn::MulAdd(x, even_w, even[r][c]);
        odd[r][c] = hn::MulAdd(x, odd_w, odd[r][c]);
      }
    }
  }
  HWY_UNROLL(8)
  for (size_t r = 0; r < R; ++r) {
    HWY_UNROLL(8)
    for (size_t c = 0; c < C; ++c) {
      float* to = out + r * out_stride + c * kDotBlock;
      if (C == 1 && last < kDotBlock) {
        HWY_ALIGN float block[kDotBlock];
        hn::StoreInterleaved2(even[r][c], odd[r][c], d, block);
        std::memcpy(to, block, last * sizeof(float));
      } else {
        hn::StoreInterleaved2(even[r][c], odd[r][c], d, to);
      }
    }
  }
}

template <size_t R>
HWY_INLINE void AbsorbRows(const float* q, size_t q_stride, const uint16_t* w, size_t w_stride, size_t inputs,
                           size_t columns, float* out, size_t out_stride) {
  if (columns == kAbsorbBlocks * kDotBlock) {
    AbsorbTile<R, kAbsorbBlocks>(q, q_stride, w, w_stride, inputs, out, out_stride, kDotBlock);
    return;
  }
  for (size_t c = 0; c < columns; c += kDotBlock) {
    AbsorbTile<R, 1>(q, q_stride, w + c, w_stride, inputs, out + c, out_stride,
                     std::min(kDotBlock, columns - c));
  }
}

void AbsorbQueryTarget(Context& context, const AbsorbQueryArgs& args) {
  constexpr int64_t kTile = kAbsorbBlocks * kDotBlock;
  const int64_t rows = args.q.rows, latent = args.latent, q_head = args.nope + args.rope,
                out_head = latent + args.rope;
  const int64_t tiles = (latent + kTile - 1) / kTile;
  ParallelRanges(context, args.heads * tiles, 1, rows * args.nope * kTile, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t head = item / tiles, column = item % tiles * kTile;
      const int64_t columns = std::min(kTile, latent - column);
      const uint16_t* w = args.w_kv_b + head * (args.nope + args.v) * latent + column;
      const float* q = args.q.f32() + head * q_head;
      float* out = args.out.f32() + head * out_head + column;
      int64_t r = 0;
      for (; r + static_cast<int64_t>(kAbsorbRows) <= rows; r += kAbsorbRows) {
        AbsorbRows<kAbsorbRows>(q + r * args.q.stride, args.q.stride, w, latent, args.nope, columns,
                                out + r * args.out.stride, args.out.stride);
      }
      for (; r < rows; ++r) {
        AbsorbRows<1>(q + r * args.q.stride, args.q.stride, w, latent, args.nope, columns,
                      out + r * args.out.stride, args.out.stride);
      }
      if (column != 0 || args.positions != nullptr) continue;
      for (r = 0; r < rows; ++r) {
        std::memcpy(out + r * args.out.stride + latent, q + r * args.q.stride + args.nope,
                    args.rope * sizeof(float));
      }
    }
  });
}

void AbsorbValueTarget(Context& context, const AbsorbValueArgs& args) {
  const int64_t rows = args.attended.rows, latent = args.latent;
  const int64_t head_size = static_cast<int64_t>(PackedSize(latent)), packed_stride = args.heads * head_size;
  float* packed = context.scratch[0].Get<float>(rows * packed_stride);
  ParallelRanges(context, args.heads, 1, rows * latent * args.v, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) {
      float* const x = packed + head * head_size;
      for (int64_t r = 0; r < rows; ++r) {
        PackRow(args.attended.f32() + r * args.attended.stride + head * latent, latent,
                x + r * packed_stride);
      }
      const uint16_t* w = args.w_kv_b + (head * (args.nope + args.v) + args.nope) * latent;
      DotAll(x, packed_stride, rows, w, latent, latent, args.v, args.out.f32() + head * args.v,
             args.out.stride, false, head + 1 < end ? w + (args.nope + args.v) * latent : nullptr);
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace kdt::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kdt::kernels::cpu {

HWY_EXPORT(AbsorbQueryTarget);
HWY_EXPORT(AbsorbValueTarget);

namespace {

// The rope part of every head, rotated on its way to the output.
void RotateInto(Context& context, const AbsorbQueryArgs& args) {
  KDT_CHECK(args.rope % 2 == 0);
  float* const table = context.scratch[0].Get<float>(args.q.rows * args.rope);
  ParallelRanges(context, args.q.rows, 1, args.rope * (args.heads + 16), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* const cos = table + r * args.rope;
      float* const sin = cos + args.rope / 2;
      RopeTable(args.positions[r], args.inv_freq, args.rope / 2, args.attention_factor, cos, sin);
      for (int64_t head = 0; head < args.heads; ++head) {
        RotatePairs(args.q.f32() + r * args.q.stride + head * (args.nope + args.rope) + args.nope, cos, sin,
                    args.rope / 2, RopeLayout::kInterleaved,
                    args.out.f32() + r * args.out.stride + head * (args.latent + args.rope) + args.latent);
      }
    }
  });
}

}  // namespace

void AbsorbQuery(Context& context, const AbsorbQueryArgs& args) {
  KDT_CHECK(args.q.dtype == DType::kF32 && args.out.dtype == DType::kF32 && args.q.rows == args.out.rows);
  KDT_CHECK(args.q.cols == args.heads * (args.nope + args.rope));
  KDT_CHECK(args.out.cols == args.heads * (args.latent + args.rope));
  HWY_DYNAMIC_DISPATCH(AbsorbQueryTarget)(context, args);
  if (args.positions != nullptr) RotateInto(context, args);
}

void AbsorbValue(Context& context, const AbsorbValueArgs& args) {
  KDT_CHECK(args.attended.dtype == DType::kF32 && args.out.dtype == DType::kF32);
  KDT_CHECK(args.attended.rows == args.out.rows);
  KDT_CHECK(args.attended.cols == args.heads * args.latent && args.out.cols == args.heads * args.v);
  HWY_DYNAMIC_DISPATCH(AbsorbValueTarget)(context, args);
}

}  // namespace kdt::kernels::cpu
#endif  // HWY_ONCE
