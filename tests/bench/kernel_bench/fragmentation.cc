// The verify kernel over a fragmented KV pool, over the same pool after live relocation has made the sequence
// one run, and over slots in random order, which no pool gives. The tables are those of a KvPool;
// relocation's moves are applied, and the kernel must give the same bits before and behind them.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "common/status.h"
#include "tests/bench/kernel_bench/bench.h"
#include "tests/bench/kernel_bench/device.h"
#include "worker/kv_pool/kv_pool.h"

namespace kdt::bench {
namespace {

using kernels::DType;
using kernels::MakeTensor;

constexpr int64_t kHeads = 8, kLatent = 512, kRope = 64, kWidth = 576;
constexpr int64_t kRows = 8;
constexpr int64_t kHoles = 8192;
constexpr int64_t kMovedAtOnce = 4096;
constexpr int kCopies = 6;  // of the pool's memory, so that no run finds its keys in L2
constexpr SequenceId kSubject = 1 << 20, kBlocker = kSubject + 1;

void Extend(KvPool& pool, SequenceId id, int64_t expected, int64_t rows) {
  std::vector<int32_t> kept(rows);
  std::iota(kept.begin(), kept.end(), 0);
  std::vector<SlotMove> moves;
  if (!pool.Alive(id)) KDT_CHECK(pool.CreateSequence(id, expected).ok());
  KDT_CHECK(pool.BeginRows(id, rows).ok());
  KDT_CHECK(pool.Commit(id, kept, &moves).ok());
}

// Short sequences, of which every other one ends, leave nothing but holes for a long one. Later, when another
// long one has ended, there is room to move it to.
std::unique_ptr<KvPool> Churn(int64_t context) {
  const int64_t hole = context / kHoles;
  const int64_t blocked = context + 1024;
  auto pool = std::move(KvPool::Create(2 * kHoles * hole + kRows + blocked, 2 * kHoles + 2, blocked)).value();
  for (SequenceId id = 0; id < 2 * kHoles; ++id) Extend(*pool, id, hole, hole);
  Extend(*pool, kBlocker, blocked, blocked);
  for (SequenceId id = 0; id < 2 * kHoles; id += 2) KDT_CHECK(pool->FreeSequence(id).ok());
  for (int64_t at = 0; at < context; at += 512)
    Extend(*pool, kSubject, context, std::min<int64_t>(512, context - at));
  KDT_CHECK(pool->FreeSequence(kBlocker).ok());
  return pool;
}

int64_t Runs(const std::vector<int32_t>& table) {
  int64_t runs = 0;
  for (size_t i = 0; i < table.size(); ++i) runs += i == 0 || table[i] != table[i - 1] + 1 ? 1 : 0;
  return runs;
}

}  // namespace

void BenchFragmentation(Bench& bench) {
  const cudaStream_t stream = bench.launch().stream;
  for (const int64_t context : {65536, 131072}) {
    const auto pool = Churn(context);
    const int64_t slots = pool->stats().slots_total + 1;
    void* const memory = bench.Memory(kCopies * slots * kWidth * 2);
    const auto copy = [&](int i) {
      return static_cast<char*>(memory) + static_cast<size_t>(i % kCopies) * slots * kWidth * 2;
    };
    FillNormal(stream, memory, kCopies * slots * kWidth, 2, 1.0f);
    void* const q = bench.Memory(kRows * kHeads * kWidth * 2);
    FillNormal(stream, q, kRows * kHeads * kWidth, 3, 1.0f);
    const size_t out_bytes = kRows * kHeads * kLatent * 2;
    void* const out = bench.Memory(out_bytes);
    std::vector<uint64_t> bits(kRows * kernels::kAncestorWords, 0);
    for (int64_t i = 0; i < kRows; ++i) {  // a binary tree
      for (int64_t node = i; node >= 0; node = node == 0 ? -1 : (node - 1) / 2)
        bits[i * kernels::kAncestorWords] |= uint64_t{1} << node;
    }
    kernels::VerifyAttentionArgs args;
    args.q = MakeTensor(q, DType::kBF16, kRows, kHeads * kWidth);
    args.heads = kHeads, args.latent = kLatent, args.rope = kRope, args.scale = 0.1f;
    args.sequences = 1;
    args.row_begin = bench.Copy(std::vector<int32_t>{0, kRows});
    args.context_length = bench.Copy(std::vector<int32_t>{static_cast<int32_t>(context)});
    args.causal = bench.Copy(std::vector<uint8_t>{0});
    args.table_stride = context + kRows;
    args.ancestor_bits = bench.Copy(bits);
    args.out = MakeTensor(out, DType::kBF16, kRows, kHeads * kLatent);
    const auto run = [&](int i) {
      args.pool = MakeTensor(copy(i), DType::kBF16, slots, kWidth);
      return cuda::VerifyAttention(bench.launch(), args);
    };
    // Times the kernel with this table, and gives what it computes in the first copy.
    const auto time = [&](const char* what, std::vector<int32_t> table) {
      args.slot_table = bench.Copy(table);
      const double keys = static_cast<double>(context);
      bench.Report({"verify_attention",
                    "context " + std::to_string(context) + " rows 8, " + what + ", runs " +
                        std::to_string(Runs(table)),
                    bench.Median(run), keys * kWidth * 2, keys * kRows * kHeads * 2 * (kWidth + kLatent), 0});
      std::vector<char> result(out_bytes);
      KDT_BENCH_CUDA(run(0));
      KDT_BENCH_CUDA(cudaStreamSynchronize(stream));
      KDT_BENCH_CUDA(cudaMemcpy(result.data(), out, out_bytes, cudaMemcpyDeviceToHost));
      return result;
    };
    const auto table = [&] {
      const auto span = pool->Table(kSubject);
      return std::vector<int32_t>(span.begin(), span.end());
    };

    // The copies of the pool are moved as the layers of one.
    const auto move = [&](const std::vector<int32_t>& from, const std::vector<int32_t>& to) {
      KDT_BENCH_CUDA(cuda::KvMove(
          bench.launch(), {bench.Copy(from), bench.Copy(to), static_cast<int64_t>(from.size()),
                           MakeTensor(memory, DType::kBF16, slots, kWidth), kCopies, slots * kWidth}));
    };

    KDT_CHECK(pool->BeginRows(kSubject, kRows).ok());
    const std::vector<int32_t> fragmented = table();
    const std::vector<char> before = time("fragmented", fragmented);
    std::vector<SlotMove> none;
    KDT_CHECK(pool->Commit(kSubject, {}, &none).ok());
    int64_t moved = 0, calls = 0;
    for (auto moves = pool->Relocate(kMovedAtOnce); !moves.empty(); moves = pool->Relocate(kMovedAtOnce)) {
      std::vector<int32_t> from, to;
      for (const SlotMove& m : moves) from.push_back(m.from), to.push_back(m.to);
      move(from, to);
      moved += static_cast<int64_t>(from.size());
      ++calls;
    }
    KDT_CHECK(pool->BeginRows(kSubject, kRows).ok());
    const std::vector<int32_t> relocated = table();
    // The tree's rows are new in every step: here they keep what they held.
    move({fragmented.end() - kRows, fragmented.end()}, {relocated.end() - kRows, relocated.end()});
    const bool same = time("relocated", relocated) == before;
    std::printf("context %ld: %ld rows moved in %ld calls; the kernel's bits are %s\n",
                static_cast<long>(context), static_cast<long>(moved), static_cast<long>(calls),
                same ? "the same" : "OTHERS");
    if (!same) std::exit(1);
    std::vector<int32_t> shuffled(slots - 1);
    std::iota(shuffled.begin(), shuffled.end(), 1);
    std::shuffle(shuffled.begin(), shuffled.end(), std::mt19937(1));
    shuffled.resize(context + kRows);
    time("random slots", shuffled);
    KDT_BENCH_CUDA(cudaFree(memory));
  }
}

}  // namespace kdt::bench
