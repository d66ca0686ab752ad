// Pieces of all sizes arrive where they belong, whatever buffers and threads they pass through.
#include "worker/model/parallel_copy.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>

#include "tests/support/catch.h"

namespace kdt {

TEST_CASE("every piece arrives, strided ones without gaps") {
  const auto backend = *kernels::MakeCpuBackend(1);
  std::mt19937 random(1);
  constexpr int64_t kSource = int64_t{72} << 20;  // more than one thread's share
  std::vector<std::byte> source(kSource);
  for (int64_t i = 0; i < kSource; i += 8) *reinterpret_cast<uint64_t*>(&source[i]) = random();
  std::vector<char> target(2 * kSource + 64);

  struct Expected {
    int64_t from, rows, stride, row_bytes, to;
  };
  std::vector<Expected> pieces;
  int64_t to = 0;
  while (to < 3 * kSource / 2) {
    Expected piece{};
    piece.row_bytes = 1 + static_cast<int64_t>(random() % 70000);
    piece.stride = piece.row_bytes + (random() % 3 == 0 ? 0 : static_cast<int64_t>(random() % 5000));
    piece.rows = 1 + static_cast<int64_t>(random() % 400);
    piece.rows = std::min(piece.rows, (2 * kSource - to) / piece.row_bytes);
    piece.from = static_cast<int64_t>(random() % (kSource / 2));
    piece.rows = std::min(piece.rows, (kSource - piece.from) / piece.stride);
    if (piece.rows < 1) continue;
    piece.to = to;
    to += piece.rows * piece.row_bytes + static_cast<int64_t>(random() % 2);  // some lie behind each other
    pieces.push_back(piece);
  }
  ParallelCopy copy;
  int64_t total = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Expected& p = pieces[i];
    copy.Add({source.data() + p.from, p.rows, p.stride, p.row_bytes, target.data() + p.to, i});
    total += p.rows * p.row_bytes;
  }
  std::atomic<int64_t> outside{0};
  int64_t reported = 0;
  const absl::Status status = copy.Run(
      *backend, 4,
      [&](size_t tag, std::span<const std::byte> bytes) {
        const Expected& p = pieces[tag];
        const int64_t begin = bytes.data() - source.data();
        const auto end = begin + static_cast<int64_t>(bytes.size());
        if (begin < p.from || end > p.from + p.rows * p.stride) ++outside;
      },
      [&](uint64_t bytes) { reported += static_cast<int64_t>(bytes); });
  REQUIRE(status.ok());
  CHECK(outside == 0);
  CHECK(reported == total);
  int64_t wrong = 0;
  for (const Expected& p : pieces) {
    for (int64_t row = 0; row < p.rows; ++row) {
      wrong += std::memcmp(target.data() + p.to + row * p.row_bytes, source.data() + p.from + row * p.stride,
                           p.row_bytes) != 0;
    }
  }
  CHECK(wrong == 0);
  // Everything was forgotten.
  reported = 0;
  CHECK(
      copy.Run(*backend, 1, nullptr, [&](uint64_t bytes) { reported += static_cast<int64_t>(bytes); }).ok());
  CHECK(reported == 0);
}

}  // namespace kdt
