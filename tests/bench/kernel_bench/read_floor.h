// Kernels that only read: what any kernel needs for so many bytes in a chain of dependent launches. Each
// reads its share of the bytes on every multiprocessor, adds all words up, and takes in the sums of the
// kernel in front, so that a wrong or missing read shows in the last kernel's words.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "tests/bench/kernel_bench/bench.h"

namespace kdt::bench {

enum class ReadForm {
  kRead,            // asks for its bytes before it waits for the kernel in front
  kDependent,       // learns where its bytes are from the kernel in front
  kDependentTwice,  // the same, and the last third is used behind a hand-over between all blocks
};

struct ReadParams {
  const char* pool;
  int64_t place;           // of the bytes in the pool, for kRead
  int64_t* told_place;     // the same for the others, as the kernel in front has left it;
  int64_t next_place;      // what this one leaves for the next kernel, behind it
  int64_t lines;           // of 128 bytes
  const uint32_t* before;  // the words of the kernel in front, one a block
  uint32_t* words;  // one a block: the sum of its own words, of all of `before`, and of what was handed over
  unsigned long long *handed, *next_handed;  // zero in front; the next launch's, which this one makes zero
};

int ReadWays();
std::string ReadWayName(int way);
// Blocks of a launch.
int ReadBlocks(const cuda::Launch& launch, int way);
cudaError_t Read(const cuda::Launch& launch, ReadForm form, int way, const ReadParams& params);
// What `blocks` blocks should find: sums of each one's share, then of the first two thirds of each share.
void SumShares(cudaStream_t stream, const char* bytes, int64_t lines, int blocks, uint32_t* sums);

class ReadFloors {
 public:
  // Random words to read.
  ReadFloors(const Bench& bench, const void* pool, size_t bytes);
  // One of `count` launches in a chain as Bench::Chain's, each with other `bytes`, by the fastest way.
  ReadTime Least(ReadForm form, double bytes, int count);

 private:
  double Time(ReadForm form, int way, double bytes, int count);
  void Check(ReadForm form, int way, int64_t lines, const std::vector<int64_t>& place, int blocks);

  std::pair<uint32_t, uint32_t> SumOf(int64_t place, int64_t lines, int blocks);

  const Bench& bench_;
  const char* pool_;
  int64_t pool_lines_;
  int64_t* told_places_;
  uint32_t *words_, *sums_;
  unsigned long long* handed_;
  std::map<std::tuple<int64_t, int64_t, int>, std::pair<uint32_t, uint32_t>> known_;
};

}  // namespace kdt::bench
