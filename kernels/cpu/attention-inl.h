// Online-softmax attention of a few queries over one block of keys, shared by verify and draft attention.
//
// A query's result depends on its keys and their order alone: it walks them in blocks of kKeyBlock, each
// score is one dot product in a fixed order, each value sum runs over the block's keys in order. How many
// queries share a tile, and which keys behind its own last one a block holds for others, change nothing.
#if defined(KDT_KERNELS_CPU_ATTENTION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDT_KERNELS_CPU_ATTENTION_INL_H_
#undef KDT_KERNELS_CPU_ATTENTION_INL_H_
#else
#define KDT_KERNELS_CPU_ATTENTION_INL_H_
#endif

#include <limits>

#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kdt::kernels::cpu {
namespace HWY_NAMESPACE {

inline constexpr size_t kKeyBlock = 64;
inline constexpr size_t kQueryTile = kManyRegisters ? 4 : 2;
static_assert(kKeyBlock % kLanes == 0);

// A query on its way over the blocks.
struct Query {
  const float* q;  // [key_dim]
  float* out;      // [value_dim]: the unnormalised sum of values
  float max;
  float sum;  // of exp(score - max)
};

struct KeyBlock {
  const float* keys[kKeyBlock];    // [key_dim] each
  const float* values[kKeyBlock];  // [value_dim] each
};

HWY_INLINE void StartQuery(Query& query, const float* q, float* out) {
  query = {q, out, -std::numeric_limits<float>::infinity(), 0.0f};
}

HWY_INLINE void FinishQuery(const Query& query, size_t value_dim) {
  const DF d;
  const VF factor = hn::Set(d, query.sum == 0.0f ? 0.0f : 1.0f / query.sum);
  Transform(query.out, query.out, value_dim, [factor](VF v) HWY_ATTR { return hn::Mul(v, factor); });
}

// scores[q][k] = queries[q] . keys[k] for a Q x K tile.
template <size_t Q, size_t K>
HWY_INLINE void ScoreTile(const Query* queries, const float* const* keys, size_t dim,
                          float (*scores)[kKeyBlock]) {
  const DF d;
  VF sums[Q][K];
  HWY_UNROLL(8)
  for (size_t q = 0; q < Q; ++q) {
    HWY_UNROLL(8)
    for (size_t k = 0; k < K; ++k) sums[q][k] = hn::Zero(d);
  }
  size_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    VF qs[Q];
    HWY_UNROLL(8)
    for (size_t q = 0; q < Q; ++q) qs[q] = hn::LoadU(d, queries[q].q + i);
    HWY_UNROLL(8)
    for (size_t k = 0; k < K; ++k) {
      const VF key = hn::LoadU(d, keys[k] + i);
      HWY_UNROLL(8)
      for (size_t q = 0; q < Q; ++q) sums[q][k] = hn::MulAdd(qs[q], key, sums[q][k]);
    }
  }
  if (i < dim) {
    for (size_t k = 0; k < K; ++k) {
      const VF key = LoadTail(d, keys[k] + i, dim - i);
      for (size_t q = 0; q < Q; ++q) {
        sums[q][k] = hn::MulAdd(LoadTail(d, queries[q].q + i, dim - i), key, sums[q][k]);
      }
    }
  }
  HWY_UNROLL(8)
  for (size_t q = 0; q < Q; ++q) {
    if constexpr (K % 4 == 0) {
      HWY_UNROLL(8)
      for (size_t k = 0; k < K; k += 4) {
        hn::StoreU(SumLanes4(d, sums[q][k], sums[q][k + 1], sums[q][k + 2], sums[q][k + 3]), D4(),
                   &scores[q][k]);
      }
    } else {
      for (size_t k = 0; k < K; ++k) scores[q][k] = SumLanes(d, sums[q][k]);
    }
  }
}

// out[q][0 .. C * kLanes) = out * correction + sum over k of p[q][k] values[k], from column `column` on.
template <size_t Q, size_t C>
HWY_INLINE void ValueTile(const Query* queries, const float* const* values, size_t count, size_t column,
                          const float (*p)[kKeyBlock], const float* correction) {
  const DF d;
  VF sums[Q][C];
  HWY_UNROLL(8)
  for (size_t q = 0; q < Q; ++q) {
    const VF factor = hn::Set(d, correction[q]);
    HWY_UNROLL(8)
    for (size_t c = 0; c < C; ++c) {
      // A query's first block: what lies in `out` is not a sum yet and may be anything.
      const VF old = correction[q] == 0.0f ? hn::Zero(d) : hn::LoadU(d, queries[q].out + column + c * kLanes);
      sums[q][c] = hn::Mul(old, factor);
    }
  }
  for (size_t k = 0; k < count; ++k) {
    VF vs[C];
    HWY_UNROLL(8)
    for (size_t c = 0; c < C; ++c) vs[c] = hn::LoadU(d, values[k] + column + c * kLanes);
    HWY_UNROLL(8)
    for (size_t q = 0; q < Q; ++q) {
      const VF weight = hn::Set(d, p[q][k]);
      HWY_UNROLL(8)
      for (size_t c = 0; c < C; ++c) sums[q][c] = hn::MulAdd(weight, vs[c], sums[q][c]);
    }
  }
  HWY_UNROLL(8)
  for (size_t q = 0; q < Q; ++q) {
    HWY_UNROLL(8)
    for (size_t c = 0; c < C; ++c) hn::StoreU(sums[q][c], d, queries[q].out + column + c * kLanes);
  }
}

// The last columns, fewer than a vector.
template <size_t Q>
HWY_INLINE void ValueTail(const Query* queries, const float* const* values, size_t count, size_t column,
                          size_t width, const float (*p)[kKeyBlock], const float* correction) {
  const DF d;
  for (size_t q = 0; q < Q; ++q) {
    VF sum = hn::Zero(d);
    if (correction[q] != 0.0f) sum = LoadTail(d, queries[q].out + column, width);
    sum = hn::Mul(sum, hn::Set(d, correction[q]));
    for (size_t k = 0; k < count; ++k) {
      sum = hn::MulAdd(hn::Set(d, p[q][k]), LoadTail(d, values[k] + column, width), sum);
    }
    StoreTail(sum, d, queries[q].out + column, width);
  }
}

// The first `count` keys of a block for Q queries.
template <size_t Q>
HWY_INLINE void AttendTile(Query* queries, const KeyBlock& block, size_t count, size_t key_dim,
                           size_t value_dim, float scale) {
  constexpr size_t kKeys = Q == 1 ? 8 : 4;
  constexpr size_t kColumns = Q == 1 ? 8 : 4;
  const DF d;
  HWY_ALIGN float p[Q][kKeyBlock];
  size_t k = 0;
  for (; k + kKeys <= count; k += kKeys) {
    ScoreTile<Q, kKeys>(queries, block.keys + k, key_dim, reinterpret_cast<float(*)[kKeyBlock]>(&p[0][k]));
  }
  for (; k < count; ++k) {
    ScoreTile<Q, 1>(queries, block.keys + k, key_dim, reinterpret_cast<float(*)[kKeyBlock]>(&p[0][k]));
  }
  float correction[Q];
  for (size_t q = 0; q < Q; ++q) {
    for (k = count; k < kKeyBlock; ++k) p[q][k] = -std::numeric_limits<float>::infinity();
    const VF scales = hn::Set(d, scale);
    VF best = hn::Set(d, queries[q].max);
    for (k = 0; k < kKeyBlock; k += kLanes) {
      const VF score = hn::Mul(hn::Load(d, &p[q][k]), scales);
      hn::Store(score, d, &p[q][k]);
      best = hn::Max(best, score);
    }
    const float max = MaxLane(d, best);
    const VF shift = hn::Set(d, max);
    VF sum = hn::Zero(d);
    for (k = 0; k < kKeyBlock; k += kLanes) {
      const VF weight = Exp(d, hn::Sub(hn::Load(d, &p[q][k]), shift));
      hn::Store(weight, d, &p[q][k]);
      sum = hn::Add(sum, weight);
    }
    correction[q] = hn::GetLane(Exp(d, hn::Set(d, queries[q].max - max)));
    queries[q].sum = queries[q].sum * correction[q] + SumLanes(d, sum);
    queries[q].max = max;
  }
  size_t column = 0;
  for (; column + kColumns * kLanes <= value_dim; column += kColumns * kLanes) {
    ValueTile<Q, kColumns>(queries, block.values, count, column, p, correction);
  }
  for (; column + kLanes <= value_dim; column += kLanes) {
    ValueTile<Q, 1>(queries, block.values, count, column, p, correction);
  }
  if (column < value_dim) {
    ValueTail<Q>(queries, block.values, count, column, value_dim - column, p, correction);
  }
}

// Any number of queries over the first `count` keys of a block.
inline void AttendBlock(Query* queries, size_t queries_count, const KeyBlock& block, size_t count,
                        size_t key_dim, size_t value_dim, float scale) {
  size_t q = 0;
  for (; q + kQueryTile <= queries_count; q += kQueryTile) {
    AttendTile<kQueryTile>(queries + q, block, count, key_dim, value_dim, scale);
  }
  for (; q < queries_count; ++q) AttendTile<1>(queries + q, block, count, key_dim, value_dim, scale);
}

}  // namespace HWY_NAMESPACE
}  // namespace kdt::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // KDT_KERNELS_CPU_ATTENTION_INL_H_
