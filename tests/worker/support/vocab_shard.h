// One rank of a test whose logits are cut among ranks by vocabulary.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/collective/collective.h"
#include "worker/model/shard.h"

namespace kdt::testing {

// The rank's way to the others, who call it too; alone it needs none.
inline absl::StatusOr<std::unique_ptr<Collective>> JoinRanks(const std::string& id, Shard shard) {
  if (shard.size == 1) return MakeLocalCollective();
  return MakeShmCollective(id, shard.rank, shard.size, 1 << 16, absl::Seconds(20));
}

// The shard's columns of the first `rows` rows of [.., vocab].
inline std::vector<float> ShardColumns(const std::vector<float>& logits, int64_t rows, int64_t vocab,
                                       Shard shard) {
  std::vector<float> mine;
  for (int64_t row = 0; row < rows; ++row) {
    const float* begin = logits.data() + row * vocab + shard.Begin(vocab);
    mine.insert(mine.end(), begin, begin + shard.Count(vocab));
  }
  return mine;
}

}  // namespace kdt::testing
