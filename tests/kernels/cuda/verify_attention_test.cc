// Tree attention against float64, on random and hostile inputs, ragged batches and poisoned memory.
//
// Measured against the exact result: the relative error of the whole output, and how many outputs are within
// one bf16 step of the rounded exact value, with the step of the value itself and with that of the row's
// largest output (an output near zero is a sum whose terms cancel).
#include <algorithm>
#include <limits>

#include "tests/kernels/cuda/util.h"

namespace kdt::kernels::test {
namespace {

constexpr int64_t kLatent = 512, kRope = 64, kWidth = kLatent + kRope;
constexpr uint16_t kNan = 0x7fc1;  // also the pattern that outputs are filled with

struct Sequence {
  int rows, context;
  bool causal = false;
};

// Inputs of one call, on the host. Slots are drawn from 1 .. slots - 1 with repetition; all others hold NaN.
struct Problem {
  Problem(std::mt19937& rng, int64_t heads_in, std::vector<Sequence> sequences_in, int64_t slots,
          float q_scale = 1.0f, int padding_rows = 0)
      : heads(heads_in), sequences(std::move(sequences_in)) {
    row_begin.push_back(0);
    for (const Sequence& s : sequences) {
      row_begin.push_back(row_begin.back() + s.rows);
      context.push_back(s.context);
      causal.push_back(s.causal ? 1 : 0);
      stride = std::max<int64_t>(stride, s.context + s.rows);
    }
    rows = row_begin.back() + padding_rows;
    q = Normal(rng, rows * heads * kWidth, q_scale);
    pool.assign(slots * kWidth, kNan);
    table.assign(sequences.size() * stride, static_cast<int32_t>(slots - 1));  // past the end: a slot of NaN
    for (size_t s = 0; s < sequences.size(); ++s) {
      for (int i = 0; i < sequences[s].context + sequences[s].rows; ++i) {
        const int32_t slot = static_cast<int32_t>(rng() % (slots - 2)) + 1;
        table[s * stride + i] = slot;
        if (pool[slot * kWidth] != kNan) continue;
        const std::vector<uint16_t> row = ToBf16(Normal(rng, kWidth));
        std::copy(row.begin(), row.end(), pool.begin() + slot * kWidth);
      }
    }
    bits.assign(rows * kAncestorWords, 0);
    for (size_t s = 0; s < sequences.size(); ++s) {
      if (sequences[s].causal) continue;
      for (int i = 0; i < sequences[s].rows; ++i) {
        uint64_t* mine = bits.data() + (row_begin[s] + i) * kAncestorWords;
        if (i > 0) {
          const uint64_t* parent =
              bits.data() + (row_begin[s] + static_cast<int>(rng() % i)) * kAncestorWords;
          std::copy(parent, parent + kAncestorWords, mine);
        }
        mine[i / 64] |= uint64_t{1} << (i % 64);
      }
    }
  }

  bool Sees(size_t s, int row, int key) const {
    const int node = key - sequences[s].context;
    if (node < 0) return true;
    if (sequences[s].causal) return node <= row;
    return (bits[(row_begin[s] + row) * kAncestorWords + node / 64] >> (node % 64) & 1) != 0;
  }

  // [rows, heads * latent]; rows of padding stay NaN.
  std::vector<double> Exact() const {
    std::vector<double> out(rows * heads * kLatent, std::numeric_limits<double>::quiet_NaN());
    std::vector<float> key(kWidth);
    for (size_t s = 0; s < sequences.size(); ++s) {
      const int length = sequences[s].context + sequences[s].rows;
      const int queries = sequences[s].rows * static_cast<int>(heads);
      std::vector<double> top(queries, -std::numeric_limits<double>::infinity()), sum(queries, 0.0);
      std::vector<double> acc(queries * kLatent, 0.0);
      for (int k = 0; k < length; ++k) {
        const uint16_t* from = pool.data() + table[s * stride + k] * kWidth;
        for (int64_t c = 0; c < kWidth; ++c) key[c] = Bf16ToFloat(from[c]);
        for (int i = 0; i < queries; ++i) {
          if (!Sees(s, i / static_cast<int>(heads), k)) continue;
          const float* query = q.data() + (row_begin[s] * heads + i) * kWidth;
          double dot = 0;
          for (int64_t c = 0; c < kWidth; ++c) dot += static_cast<double>(query[c]) * key[c];
          dot *= scale;
          if (dot > top[i]) {
            const double factor = std::exp(top[i] - dot);
            for (int64_t c = 0; c < kLatent; ++c) acc[i * kLatent + c] *= factor;
            sum[i] *= factor;
            top[i] = dot;
          }
          const double weight = std::exp(dot - top[i]);
          sum[i] += weight;
          for (int64_t c = 0; c < kLatent; ++c) acc[i * kLatent + c] += weight * key[c];
        }
      }
      for (int i = 0; i < queries; ++i) {
        for (int64_t c = 0; c < kLatent; ++c)
          out[(row_begin[s] * heads + i) * kLatent + c] = acc[i * kLatent + c] / sum[i];
      }
    }
    return out;
  }

  // By the fast kernels or by the reference.
  std::vector<uint16_t> Run(bool reference = false) const {
    const OnGpu<uint16_t> device_q(ToBf16(q)), device_pool(pool);
    const OnGpu<uint8_t> device_causal(causal);
    const OnGpu<int32_t> device_begin(row_begin), device_context(context), device_table(table);
    const OnGpu<uint64_t> device_bits(bits);
    const OnGpu<uint16_t> out(std::vector<uint16_t>(rows * heads * kLatent, kNan));
    VerifyAttentionArgs args;
    args.q = MakeTensor(device_q.data(), DType::kBF16, rows, heads * kWidth);
    args.pool =
        MakeTensor(device_pool.data(), DType::kBF16, static_cast<int64_t>(pool.size()) / kWidth, kWidth);
    args.heads = heads;
    args.latent = kLatent;
    args.rope = kRope;
    args.scale = scale;
    args.sequences = static_cast<int64_t>(sequences.size());
    args.row_begin = device_begin.data();
    args.context_length = device_context.data();
    args.causal = device_causal.data();
    args.slot_table = device_table.data();
    args.table_stride = stride;
    args.ancestor_bits = device_bits.data();
    args.out = MakeTensor(out.data(), DType::kBF16, rows, heads * kLatent);
    args.split_keys = split_keys;
    REQUIRE((reference ? Gpu()->VerifyAttentionReference(args) : Gpu()->VerifyAttention(args)).ok());
    return out.Get();
  }

  int64_t heads, rows = 0, stride = 0;
  int64_t split_keys = 0;
  std::vector<Sequence> sequences;
  float scale = 0.0721688f;  // 192^-0.5
  std::vector<int32_t> row_begin, context, table;
  std::vector<uint8_t> causal;
  std::vector<float> q;
  std::vector<uint16_t> pool;
  std::vector<uint64_t> bits;
};

struct Accuracy {
  double error;         // ||out - exact|| / ||exact||
  double near_row;      // share of the outputs within one step of the row
  double near_own;      // share within one step of the value itself
  bool padding_intact;  // rows outside every sequence are as they were
};

Accuracy Measure(const std::vector<double>& exact, const std::vector<uint16_t>& got) {
  double error = 0, norm = 0;
  size_t near_row = 0, near_own = 0, count = 0;
  Accuracy result{0, 0, 0, true};
  const auto step_of = [](double x) { return std::ldexp(1.0, (x != 0 ? std::ilogb(x) : -126) - 7); };
  for (size_t row = 0; row < exact.size(); row += kLatent) {
    double largest = 0;
    for (int64_t c = 0; c < kLatent; ++c) largest = std::max(largest, std::abs(exact[row + c]));
    for (size_t i = row; i < row + kLatent; ++i) {
      if (std::isnan(exact[i])) {
        result.padding_intact = result.padding_intact && got[i] == kNan;
        continue;
      }
      const double value = Bf16ToFloat(got[i]);
      const double rounded = Bf16ToFloat(FloatToBf16(static_cast<float>(exact[i])));
      error += (value - exact[i]) * (value - exact[i]);
      norm += exact[i] * exact[i];
      near_row += std::abs(value - rounded) <= step_of(largest) ? 1 : 0;
      near_own += std::abs(value - rounded) <= step_of(rounded) ? 1 : 0;
      ++count;
    }
  }
  result.error = std::sqrt(error / norm);
  result.near_row = static_cast<double>(near_row) / static_cast<double>(count);
  result.near_own = static_cast<double>(near_own) / static_cast<double>(count);
  return result;
}

void CheckAgainstExact(const Problem& problem) {
  const std::vector<double> exact = problem.Exact();
  const Accuracy fast = Measure(exact, problem.Run());
  CHECK(fast.padding_intact);
  CHECK(fast.error < 4e-3);  // false for NaN
  CHECK(fast.near_row >= 0.999);
  CHECK(fast.near_own >= 0.999);
  const Accuracy reference = Measure(exact, problem.Run(true));
  CHECK(reference.padding_intact);
  CHECK(reference.error < 2.5e-3);  // rounding to bf16 alone is 1.7e-3
  CHECK(reference.near_own >= 0.999);
}

TEST_CASE("cuda: verify_attention on one sequence, for every head count") {
  KDT_NEED_GPU();
  std::mt19937 rng(20);
  CheckAgainstExact(Problem(rng, 8, {{1, 1000}}, 3000));
  CheckAgainstExact(Problem(rng, 8, {{3, 777}}, 3000));
  // Up to 128 query rows: tiles of 32 rows with few keys, of 64 with many.
  CheckAgainstExact(Problem(rng, 8, {{8, 4096}}, 9000));
  CheckAgainstExact(Problem(rng, 8, {{8, 12000}}, 9000));
  CheckAgainstExact(Problem(rng, 8, {{13, 5000}}, 9000));
  for (const int context : {4335, 4336}) CheckAgainstExact(Problem(rng, 8, {{16, context}}, 9000));
  CheckAgainstExact(Problem(rng, 16, {{5, 300}}, 3000));
  CheckAgainstExact(Problem(rng, 32, {{2, 129}}, 3000));
  CheckAgainstExact(Problem(rng, 64, {{3, 64}}, 3000));
  CheckAgainstExact(Problem(rng, 2, {{256, 500}}, 3000));
  CheckAgainstExact(Problem(rng, 8, {{64, 200}}, 3000));
  // Eight tiles, whose splits leave blocks of 132 for rests, which are short here.
  CheckAgainstExact(Problem(rng, 8, {{57, 8500}}, 9000));
}

TEST_CASE("cuda: verify_attention from an empty prefix to 262144 tokens") {
  KDT_NEED_GPU();
  std::mt19937 rng(21);
  CheckAgainstExact(Problem(rng, 8, {{1, 0}}, 100));
  CheckAgainstExact(Problem(rng, 8, {{17, 0}}, 100));
  CheckAgainstExact(Problem(rng, 8, {{1, 1}}, 100));
  for (const int context : {15, 16, 17, 31, 48, 63, 1023})
    CheckAgainstExact(Problem(rng, 8, {{2, context}}, 3000));
  CheckAgainstExact(Problem(rng, 8, {{1, 262144}}, 2000));  // most slots many times over
}

TEST_CASE("cuda: verify_attention on ragged batches, chains and trees, with padding rows") {
  KDT_NEED_GPU();
  std::mt19937 rng(22);
  CheckAgainstExact(Problem(rng, 8, {{3, 100}, {64, 900}, {1, 0}, {17, 2001}}, 5000, 1.0f, 5));
  CheckAgainstExact(Problem(rng, 8, {{70, 50, true}, {8, 333}, {33, 0, true}, {1, 5}}, 3000, 1.0f, 1));
  // One sequence takes nearly all splits of a launch that has many query tiles.
  CheckAgainstExact(Problem(rng, 8, {{64, 10}, {1, 20000}}, 9000));
  std::vector<Sequence> many;
  for (int i = 0; i < 70; ++i) many.push_back({i % 9 == 4 ? 0 : 1 + i % 2, (i * 37) % 150});
  CheckAgainstExact(Problem(rng, 8, many, 3000, 1.0f, 3));
}

TEST_CASE("cuda: verify_attention on hostile scores") {
  KDT_NEED_GPU();
  std::mt19937 rng(23);
  CheckAgainstExact(Problem(rng, 8, {{9, 700}}, 3000, 100.0f));  // logits in the thousands: one key takes all
  CheckAgainstExact(Problem(rng, 8, {{9, 700}}, 3000, 0.0f));    // all scores equal
  // Keys whose scores rise along the sequence by 16 (log2) every 16 keys, so that the reference moves in
  // every round, in each configuration.
  for (const int rows : {2, 4, 8, 24}) {
    CAPTURE(rows);
    Problem rising(rng, 8, {{rows, 900}}, 3000);
    std::fill(rising.q.begin(), rising.q.end(), 1.0f);
    for (int i = 0; i < 900 + rows; ++i) {
      uint16_t* key = rising.pool.data() + rising.table[i] * kWidth;
      for (int64_t c = 0; c < kWidth; ++c)
        key[c] = FloatToBf16(static_cast<float>(i) / 60.0f + 0.01f * static_cast<float>(c % 7));
    }
    CheckAgainstExact(rising);
  }
  Problem same_slot(rng, 8, {{5, 400}}, 3000);
  std::fill(same_slot.table.begin(), same_slot.table.begin() + 400, same_slot.table[0]);
  CheckAgainstExact(same_slot);
}

TEST_CASE("cuda: a row's bits depend on no other row's content") {
  KDT_NEED_GPU();
  std::mt19937 rng(24);
  // One for each configuration of the kernel, the row of interest at index 2.
  for (const std::vector<Sequence>& sequences :
       {std::vector<Sequence>{{5, 600}, {9, 450}}, std::vector<Sequence>{{6, 700}},
        std::vector<Sequence>{{3, 300}, {4, 210}}, std::vector<Sequence>{{1, 100}, {1, 0}, {2, 333}}}) {
    Problem problem(rng, 8, sequences, 4000);
    const std::vector<uint16_t> before = problem.Run();
    CHECK(problem.Run() == before);
    // Another query everywhere but in that row: none at all, or one whose references move far.
    for (const float other : {std::nanf(""), 40.0f}) {
      for (size_t i = 0; i < problem.q.size(); ++i) {
        if (static_cast<int64_t>(i) / (8 * kWidth) != 2) problem.q[i] = i % 3 == 0 ? -other : other;
      }
      const std::vector<uint16_t> after = problem.Run();
      CHECK(std::equal(after.begin() + 2 * 8 * kLatent, after.begin() + 3 * 8 * kLatent,
                       before.begin() + 2 * 8 * kLatent));
    }
  }
}

TEST_CASE("cuda: with split_keys a sequence's bits depend on no other sequence") {
  KDT_NEED_GPU();
  std::mt19937 rng(26);
  Problem together(rng, 8, {{2, 700}, {9, 1500}, {1, 30}}, 4000);
  together.split_keys = 128;
  CheckAgainstExact(together);
  const std::vector<uint16_t> all = together.Run();
  // The first sequence alone, in a table as long.
  Problem alone = together;
  alone.sequences = {{2, 700}};
  alone.rows = 2;
  alone.row_begin = {0, 2};
  alone.q.resize(2 * 8 * kWidth);
  const std::vector<uint16_t> one = alone.Run();
  CHECK(std::equal(one.begin(), one.end(), all.begin()));
}

// One capture over buffers for so many rows and sequences, replayed for each of the batches.
void CheckCaptured(std::mt19937& rng, int64_t rows, int64_t sequences, int64_t stride,
                   const std::vector<std::vector<Sequence>>& batches) {
  const int64_t heads = 8, slots = 3000;
  OnGpu<uint16_t> q(rows * heads * kWidth, 0), pool(slots * kWidth, 0), out(rows * heads * kLatent, 0);
  OnGpu<int32_t> begin(sequences + 1, 0), context(sequences, 0), table(sequences * stride, 0);
  OnGpu<uint8_t> causal(sequences, 0);
  OnGpu<uint64_t> bits(rows * kAncestorWords, 0);
  VerifyAttentionArgs args;
  args.q = MakeTensor(q.data(), DType::kBF16, rows, heads * kWidth);
  args.pool = MakeTensor(pool.data(), DType::kBF16, slots, kWidth);
  args.heads = heads;
  args.latent = kLatent;
  args.rope = kRope;
  args.scale = 0.0721688f;
  args.sequences = sequences;
  args.row_begin = begin.data();
  args.context_length = context.data();
  args.causal = causal.data();
  args.slot_table = table.data();
  args.table_stride = stride;
  args.ancestor_bits = bits.data();
  args.out = MakeTensor(out.data(), DType::kBF16, rows, heads * kLatent);
  const auto graph = Gpu()->Capture([&] { return Gpu()->VerifyAttention(args); });
  REQUIRE(graph.ok());
  for (const std::vector<Sequence>& come : batches) {
    Problem problem(rng, heads, come, slots);
    problem.stride = std::max<int64_t>(problem.stride, 1);
    std::vector<int32_t> row_begin(sequences + 1, problem.row_begin.back());
    std::copy(problem.row_begin.begin(), problem.row_begin.end(), row_begin.begin());
    std::vector<int32_t> contexts(sequences, 7), tables(sequences * stride, 0);
    std::copy(problem.context.begin(), problem.context.end(), contexts.begin());
    for (size_t s = 0; s < come.size(); ++s) {
      std::copy_n(problem.table.begin() + s * problem.stride, problem.stride, tables.begin() + s * stride);
    }
    std::vector<uint8_t> chains(sequences, 0);
    std::copy(problem.causal.begin(), problem.causal.end(), chains.begin());
    std::vector<uint64_t> all_bits(rows * kAncestorWords, 0);
    std::copy(problem.bits.begin(), problem.bits.end(), all_bits.begin());
    std::vector<uint16_t> queries(rows * heads * kWidth, kNan);
    const std::vector<uint16_t> real = ToBf16(problem.q);
    std::copy(real.begin(), real.end(), queries.begin());
    q.Set(queries), pool.Set(problem.pool), table.Set(tables), context.Set(contexts), begin.Set(row_begin);
    causal.Set(chains), bits.Set(all_bits), out.Set(std::vector<uint16_t>(rows * heads * kLatent, kNan));
    REQUIRE((*graph)->Replay().ok());
    std::vector<uint16_t> got = out.Get();
    CHECK(std::all_of(got.begin() + problem.rows * heads * kLatent, got.end(),
                      [](uint16_t x) { return x == kNan; }));
    got.resize(problem.rows * heads * kLatent);
    const Accuracy accuracy = Measure(problem.Exact(), got);
    CHECK(accuracy.error < 4e-3);
    CHECK(accuracy.near_row >= 0.999);
    CHECK(accuracy.near_own >= 0.999);
  }
}

TEST_CASE("cuda: a captured verify_attention takes any sequences that fit its rows") {
  KDT_NEED_GPU();
  std::mt19937 rng(27);
  // A tree, single rows, a mix.
  CheckCaptured(rng, 32, 6, 1100,
                {{{32, 1000}},
                 {{1, 1000}, {1, 3}, {1, 500}, {1, 64}},
                 {{1, 900}, {20, 333}, {2, 16}, {3, 0}},
                 {{5, 77, true}}});
  // Lengths on both sides of where a lone tree's tiles change.
  CheckCaptured(rng, 8, 1, 9300, {{{8, 500}}, {{8, 9208}}, {{8, 9207}}, {{5, 9250}}, {{1, 30}}});
}

TEST_CASE("cuda: verify_attention_reference at other widths, and what compare says of two results") {
  KDT_NEED_GPU();
  std::mt19937 rng(25);
  struct Shape {
    int64_t heads, latent, rope;
  };
  for (const Shape shape : {Shape{3, 96, 16}, Shape{16, 32, 8}, Shape{9, 1024, 128}}) {
    const int64_t width = shape.latent + shape.rope, rows = 7, slots = 300;
    Twin q(rng, rows, shape.heads * width, 0.3f), pool(rng, slots, width);
    Twin out(rng, rows, shape.heads * shape.latent);
    const std::vector<int32_t> begin = {0, 2, 2, 6}, context = {200, 17, 5};  // the last row is padding
    const std::vector<uint8_t> causal = {1, 0, 0};
    std::vector<int32_t> table(3 * 210);
    for (int32_t& slot : table) slot = static_cast<int32_t>(rng() % slots);
    std::vector<uint64_t> bits(rows * kAncestorWords, 0);
    for (int i = 0; i < 4; ++i) bits[(2 + i) * kAncestorWords] = uint64_t{1} | uint64_t{1} << i;
    const OnGpu<int32_t> device_begin(begin), device_context(context), device_table(table);
    const OnGpu<uint8_t> device_causal(causal);
    const OnGpu<uint64_t> device_bits(bits);
    REQUIRE(Cpu()
                .VerifyAttentionReference({q.cpu(), pool.cpu(), shape.heads, shape.latent, shape.rope, 0.1f,
                                           3, begin.data(), context.data(), causal.data(), table.data(), 210,
                                           bits.data(), out.cpu()})
                .ok());
    REQUIRE(
        Gpu()
            ->VerifyAttentionReference({q.gpu(), pool.gpu(), shape.heads, shape.latent, shape.rope, 0.1f, 3,
                                        device_begin.data(), device_context.data(), device_causal.data(),
                                        device_table.data(), 210, device_bits.data(), out.gpu()})
            .ok());
    // The CPU's result, rounded, as the reference of both comparisons; a few values moved by hand.
    std::vector<float> moved = out.host;
    moved[0] = Bf16ToFloat(static_cast<uint16_t>(FloatToBf16(moved[0]) + 1));
    moved[1] = Bf16ToFloat(static_cast<uint16_t>(FloatToBf16(moved[1]) + 3));
    moved[2] = std::nanf("");
    moved[6 * shape.heads * shape.latent] = 1e9f;  // padding
    Twin exact(out.host, rows, shape.heads * shape.latent), other(moved, rows, shape.heads * shape.latent);
    const OnGpu<CompareStats> device_stats(std::vector<CompareStats>(2, CompareStats{}));
    const int32_t used = 6;
    CompareStats cpu{};
    REQUIRE(Gpu()->Compare({out.gpu(), exact.gpu(), device_begin.data() + 3, device_stats.data()}).ok());
    REQUIRE(
        Gpu()->Compare({other.gpu(), exact.gpu(), device_begin.data() + 3, device_stats.data() + 1}).ok());
    REQUIRE(Cpu().Compare({other.cpu_bf16(), exact.cpu_bf16(), &used, &cpu}).ok());
    const std::vector<CompareStats> stats = device_stats.Get();
    CHECK(stats[0].values == static_cast<uint64_t>(6 * shape.heads * shape.latent));
    CHECK(stats[0].beyond_one <= stats[0].values / 1000);
    CHECK(stats[0].beyond_one_of_row == 0);
    CHECK(stats[1].values == cpu.values);
    CHECK(stats[1].beyond_one == 2);
    CHECK(cpu.beyond_one == 2);
    CHECK(stats[1].beyond_one_of_row == cpu.beyond_one_of_row);
    CHECK(std::isinf(stats[1].largest));
    CHECK(std::isinf(cpu.largest_of_row));
  }
}

}  // namespace
}  // namespace kdt::kernels::test
