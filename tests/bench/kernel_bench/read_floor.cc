#include "tests/bench/kernel_bench/read_floor.h"

#include <algorithm>

namespace kdt::bench {
namespace {

constexpr int kMaxRuns = 64, kMaxReadBlocks = 2048;

}  // namespace

ReadFloors::ReadFloors(const Bench& bench, const void* pool, size_t pool_bytes)
    : bench_(bench),
      pool_(static_cast<const char*>(pool)),
      pool_lines_(static_cast<int64_t>(pool_bytes / 128)) {
  const auto zeros = [&](size_t bytes) {
    void* data = bench.Memory(bytes);
    KDT_BENCH_CUDA(cudaMemset(data, 0, bytes));
    return data;
  };
  told_places_ = static_cast<int64_t*>(zeros((kMaxRuns + 1) * sizeof(int64_t)));
  words_ = static_cast<uint32_t*>(zeros((kMaxRuns + 1) * kMaxReadBlocks * sizeof(uint32_t)));
  handed_ = static_cast<unsigned long long*>(zeros(kMaxRuns * sizeof(unsigned long long)));
  sums_ = static_cast<uint32_t*>(zeros(2 * kMaxReadBlocks * sizeof(uint32_t)));
}

double ReadFloors::Time(ReadForm form, int way, double bytes, int count) {
  const auto lines = std::min(static_cast<int64_t>(bytes / 128), pool_lines_);
  const int64_t places = pool_lines_ / lines;
  const int blocks = ReadBlocks(bench_.launch(), way);
  if (count >= kMaxRuns || blocks > kMaxReadBlocks) {
    std::fprintf(stderr, "read floor: %d runs of %d blocks are too many\n", count, blocks);
    std::exit(1);
  }
  KDT_BENCH_CUDA(cudaMemset(handed_, 0, kMaxRuns * sizeof(unsigned long long)));
  const auto place = [&](int i) { return i % places * lines * 128; };
  KDT_BENCH_CUDA(cudaMemset(told_places_, 0, sizeof(int64_t)));  // of the first one
  const double time = bench_.Chain(count, [&](int i) {
    return Read(bench_.launch(), form, way,
                {pool_, place(i), told_places_ + i, place(i + 1), lines, words_ + i * kMaxReadBlocks,
                 words_ + (i + 1) * kMaxReadBlocks, handed_ + i,
                 handed_ + (i < count ? i + 1 : 1)});  // a replay begins with launch 1
  });
  std::vector<int64_t> all(count + 1);
  for (int i = 0; i <= count; ++i) all[i] = place(i);
  Check(form, way, lines, all, blocks);
  return time;
}

// Over all bytes, and over the first two thirds of each block's share.
std::pair<uint32_t, uint32_t> ReadFloors::SumOf(int64_t place, int64_t lines, int blocks) {
  const auto [known, is_new] = known_.try_emplace({place, lines, blocks});
  if (!is_new) return known->second;
  std::vector<uint32_t> sums(2 * blocks);
  KDT_BENCH_CUDA(cudaMemset(sums_, 0, sums.size() * sizeof(uint32_t)));
  SumShares(bench_.launch().stream, pool_ + place, lines, blocks, sums_);
  KDT_BENCH_CUDA(cudaStreamSynchronize(bench_.launch().stream));
  KDT_BENCH_CUDA(cudaMemcpy(sums.data(), sums_, sums.size() * sizeof(uint32_t), cudaMemcpyDeviceToHost));
  for (int b = 0; b < blocks; ++b) known->second.first += sums[b], known->second.second += sums[blocks + b];
  return known->second;
}

// The sum of a launch's words is that of its bytes and, once for each block, of the words of the launch in
// front and of what was handed over.
void ReadFloors::Check(ReadForm form, int way, int64_t lines, const std::vector<int64_t>& place, int blocks) {
  uint32_t expected = 0;
  for (const int64_t at : place) {
    const auto [all, first] = SumOf(at, lines, blocks);
    const uint32_t handed = form == ReadForm::kDependentTwice ? first : 0;
    expected = all + static_cast<uint32_t>(blocks) * (expected + handed);
  }
  std::vector<uint32_t> words(blocks);
  const size_t last = place.size() * kMaxReadBlocks;
  KDT_BENCH_CUDA(
      cudaMemcpy(words.data(), words_ + last, words.size() * sizeof(uint32_t), cudaMemcpyDeviceToHost));
  uint32_t found = 0;
  for (const uint32_t word : words) found += word;
  if (found == expected) return;
  std::fprintf(stderr, "read floor: form %d, %s: the sum of the last launch is wrong\n",
               static_cast<int>(form), ReadWayName(way).c_str());
  std::exit(1);
}

ReadTime ReadFloors::Least(ReadForm form, double bytes, int count) {
  ReadTime least;
  for (int way = 0; way < ReadWays(); ++way) {
    const double time = Time(form, way, bytes, count);
    if (way == 0 || time < least.microseconds) least = {time, ReadWayName(way)};
  }
  return least;
}

}  // namespace kdt::bench
