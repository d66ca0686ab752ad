// Cost of the KV pool's bookkeeping: what a decode step and a relocation add on the host.
#include <benchmark/benchmark.h>

#include <numeric>

#include "common/status.h"
#include "worker/kv_pool/kv_pool.h"

namespace kdt {
namespace {

constexpr int64_t kSlots = 1 << 20, kSequences = 64, kContext = 8192;

std::vector<int32_t> FirstRows(int64_t rows) {
  std::vector<int32_t> kept(rows);
  std::iota(kept.begin(), kept.end(), 0);
  return kept;
}

void Extend(KvPool& pool, SequenceId id, int64_t rows) {
  std::vector<SlotMove> moves;
  KDT_CHECK(pool.BeginRows(id, rows).ok());
  KDT_CHECK(pool.Commit(id, FirstRows(rows), &moves).ok());
}

std::unique_ptr<KvPool> FilledPool() {
  auto pool = std::move(KvPool::Create(kSlots, 2 * kSequences, 4 * kContext)).value();
  for (int64_t id = 0; id < kSequences; ++id) {
    KDT_CHECK(pool->CreateSequence(id, 2 * kContext).ok());
    Extend(*pool, id, kContext);
  }
  return pool;
}

// One sequence's part of a decode step: tentative rows for a tree of `rows` nodes, then every other one of
// the first 8 kept. The sequence is freed and made again before it meets the context limit.
void BM_DecodeStep(benchmark::State& state) {
  auto pool = FilledPool();
  const std::vector<int32_t> kept = {0, 2, 4, 6};
  std::vector<SlotMove> moves;
  int64_t length = kContext;
  uint64_t digests = 0;
  for (auto _ : state) {
    KDT_CHECK(pool->BeginRows(7, state.range(0)).ok());
    moves.clear();
    KDT_CHECK(pool->Commit(7, kept, &moves).ok());
    digests += pool->digest();
    length += static_cast<int64_t>(kept.size());
    if (length > 3 * kContext) {
      state.PauseTiming();
      KDT_CHECK(pool->FreeSequence(7).ok());
      KDT_CHECK(pool->CreateSequence(7, 2 * kContext).ok());
      Extend(*pool, 7, kContext);
      length = kContext;
      state.ResumeTiming();
    }
  }
  benchmark::DoNotOptimize(digests);
}
BENCHMARK(BM_DecodeStep)->Arg(8)->Arg(16)->Arg(64)->Arg(256);

void BM_Stats(benchmark::State& state) {
  auto pool = FilledPool();
  for (auto _ : state) benchmark::DoNotOptimize(pool->stats());
}
BENCHMARK(BM_Stats);

// A fork of a prefix and its end: the prefix cache's part in a request.
void BM_ForkAndFree(benchmark::State& state) {
  auto pool = FilledPool();
  for (auto _ : state) {
    KDT_CHECK(pool->ForkSequence(1000, 3, state.range(0), 0).ok());
    KDT_CHECK(pool->FreeSequence(1000).ok());
  }
}
BENCHMARK(BM_ForkAndFree)->Arg(1024)->Arg(kContext);

// When nothing is to be moved, as in most steps.
void BM_RelocateIdle(benchmark::State& state) {
  auto pool = FilledPool();
  for (auto _ : state) benchmark::DoNotOptimize(pool->Relocate(1024));
}
BENCHMARK(BM_RelocateIdle);

// Per call with 1024 rows to move.
void BM_Relocate(benchmark::State& state) {
  for (auto _ : state) {
    state.PauseTiming();
    auto pool = FilledPool();
    for (int round = 0; round < 16; ++round) {
      for (const SequenceId id : {100, 101}) {
        if (round == 0) KDT_CHECK(pool->CreateSequence(id, 1).ok());
        Extend(*pool, id, 129);
      }
    }
    state.ResumeTiming();
    benchmark::DoNotOptimize(pool->Relocate(1024).size());
  }
}
BENCHMARK(BM_Relocate)->Unit(benchmark::kMicrosecond)->Iterations(20);

}  // namespace
}  // namespace kdt

BENCHMARK_MAIN();
