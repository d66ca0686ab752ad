// Attention over the latent pool in each of its configurations, its plain reference, and the drafter's.
#include <algorithm>

#include "tests/gpu/shapes/shapes.h"

namespace kdt::shapes {
namespace {

using kernels::DType;
using kernels::MakeTensor;

constexpr int64_t kLatent = 512, kRope = 64, kWidth = kLatent + kRope;

struct Sequence {
  int rows, context;
  bool causal = false;
};
struct Batch {
  std::vector<Sequence> sequences;
  int64_t heads = 8, most_rows = 0, split_keys = 0;
  bool reference = false;
};

std::string Name(const Batch& batch) {
  std::string name = batch.reference ? "verify_attention_reference" : "verify_attention";
  name += " heads " + std::to_string(batch.heads) + ", rows x context:";
  for (const Sequence& s : batch.sequences)
    name +=
        std::string(" ") + std::to_string(s.rows) + (s.causal ? "c" : "") + "x" + std::to_string(s.context);
  if (batch.most_rows > 0) name += ", at most " + std::to_string(batch.most_rows) + " rows";
  if (batch.split_keys > 0) name += ", split_keys " + std::to_string(batch.split_keys);
  return name;
}

void Verify(Shapes& s, const Batch& batch) {
  std::vector<int32_t> begin{0}, context;
  std::vector<uint8_t> causal;
  std::vector<uint64_t> bits;
  int64_t stride = 1;
  for (const Sequence& q : batch.sequences) {
    begin.push_back(begin.back() + q.rows);
    context.push_back(q.context);
    causal.push_back(q.causal);
    stride = std::max<int64_t>(stride, q.rows + q.context);
    // A tree in which every row hangs on any one before it.
    const size_t first = bits.size();
    for (int i = 0; i < q.rows; ++i) {
      uint64_t mine[kernels::kAncestorWords] = {};
      if (i > 0)
        std::copy_n(bits.data() + first + (s.Random() % i) * kernels::kAncestorWords, kernels::kAncestorWords,
                    mine);
      mine[i / 64] |= uint64_t{1} << (i % 64);
      bits.insert(bits.end(), mine, mine + kernels::kAncestorWords);
    }
  }
  const auto count = static_cast<int64_t>(batch.sequences.size());
  const int64_t rows = begin.back(), slots = count * stride;
  kernels::VerifyAttentionArgs args;
  args.q = s.Matrix(rows, batch.heads * kWidth);
  args.pool = s.Matrix(slots, kWidth);
  args.heads = batch.heads, args.latent = kLatent, args.rope = kRope, args.scale = 0.1f;
  args.sequences = count;
  args.row_begin = s.In(begin);
  args.context_length = s.In(context);
  args.causal = s.In(causal);
  args.slot_table = s.In(s.Order(slots));
  args.table_stride = stride;
  args.ancestor_bits = s.In(bits);
  args.max_sequence_rows = batch.most_rows;
  args.split_keys = batch.split_keys;
  args.out = s.OutMatrix(rows, batch.heads * kLatent);
  s.Run(Name(batch),
        [&](const cuda::Launch& launch) {
          return batch.reference ? cuda::VerifyAttentionReference(launch, args)
                                 : cuda::VerifyAttention(launch, args);
        },
        {size_t{96} << 20});
}

const std::vector<Sequence> kRagged = {{1, 300}, {0, 40}, {8, 500}, {3, 0, true}, {20, 64, true}, {2, 1000}};

// Up to 16 query rows.
void VerifySmall(Shapes& s) {
  Verify(s, {{{1, 1}}});
  Verify(s, {{{1, 4096}}});
  Verify(s, {{{2, 700}}});
  Verify(s, {{{1, 200}, {1, 33}, {0, 10}, {1, 900}}, 8, 1});
}
// Up to 32.
void VerifyMiddle(Shapes& s) {
  Verify(s, {{{3, 200}}});
  Verify(s, {{{4, 2500}}});
  Verify(s, {{{1, 50}}, 32});
}
// More: tiles of two groups of 16 rows, then of 32.
void VerifyNarrow(Shapes& s) {
  Verify(s, {{{8, 200}}});
  Verify(s, {{{16, 500}}});
  Verify(s, {{{1, 600}}, 64});
}
void VerifyLarge(Shapes& s) {
  Verify(s, {{{8, 10000}}});
  Verify(s, {{{16, 5000}}});
  Verify(s, {{{32, 300, true}}});
}
void VerifyRagged(Shapes& s) {
  Verify(s, {kRagged});
  Verify(s, {kRagged, 1});
  Verify(s, {{{1, 100}, {4, 90}}, 8, 4});
}
void VerifySplit(Shapes& s) {
  Verify(s, {{{1, 900}}, 8, 0, 256});
  Verify(s, {{{4, 900}}, 8, 0, 256});
  Verify(s, {{{8, 900}}, 8, 0, 256});
  Verify(s, {kRagged, 8, 0, 256});
}
void VerifyReference(Shapes& s) {
  Verify(s, {{{1, 200}}, 8, 0, 0, true});
  Verify(s, {kRagged, 8, 0, 0, true});
}

void Draft(Shapes& s, int64_t heads, int64_t kv_heads, int64_t dim, int64_t block,
           const std::vector<Sequence>& sequences) {
  const auto count = static_cast<int64_t>(sequences.size());
  std::vector<int32_t> context, begin;
  int64_t stride = 1;
  for (const Sequence& q : sequences) {
    context.push_back(q.context);
    begin.push_back(q.causal ? q.context / 2 : 0);
    stride = std::max<int64_t>(stride, q.context);
  }
  kernels::DraftAttentionArgs args;
  args.q = s.Matrix(count * block, heads * dim);
  args.block_k = s.Matrix(count * block, kv_heads * dim);
  args.block_v = s.Matrix(count * block, kv_heads * dim);
  args.pool = s.Matrix(count * stride, 2 * kv_heads * dim);
  args.heads = heads, args.kv_heads = kv_heads, args.dim = dim, args.block = block;
  args.scale = 0.1f;
  args.sequences = count;
  args.context_length = s.In(context);
  args.window_begin = s.In(begin);
  args.slot_table = s.In(s.Order(count * stride));
  args.table_stride = stride;
  args.out = s.OutMatrix(count * block, heads * dim);
  s.Run("draft_attention heads " + std::to_string(heads) + "/" + std::to_string(kv_heads) + " dim " +
            std::to_string(dim) + ", " + std::to_string(count) + " blocks of " + std::to_string(block),
        [&](const cuda::Launch& launch) { return cuda::DraftAttention(launch, args); });
}

void DraftAttention(Shapes& s) {
  Draft(s, 8, 1, 128, 8, {{0, 700}});
  Draft(s, 8, 2, 64, 16, {{0, 0}, {0, 300, true}, {0, 65}});
  Draft(s, 4, 4, 32, 5, {{0, 33}, {0, 500}});
}

}  // namespace

std::vector<Op> AttentionOps() {
  return {{"verify_attention_small", VerifySmall},         {"verify_attention_middle", VerifyMiddle},
          {"verify_attention_narrow", VerifyNarrow},       {"verify_attention_large", VerifyLarge},
          {"verify_attention_ragged", VerifyRagged},       {"verify_attention_split_keys", VerifySplit},
          {"verify_attention_reference", VerifyReference}, {"draft_attention", DraftAttention}};
}

}  // namespace kdt::shapes
