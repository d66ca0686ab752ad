#include "worker/draft/draft_top_k.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "tests/support/catch.h"
#include "tests/worker/support/vocab_shard.h"

namespace kdt {
namespace {

constexpr int64_t kVocab = 256;
constexpr int64_t kRows = 9;

absl::Status RunRank(int rank, int ranks, const std::string& id, const std::vector<float>& logits, int64_t k,
                     DraftCandidates* out) {
  const Shard shard{rank, ranks};
  const int64_t local = shard.Count(kVocab);
  KDT_ASSIGN_OR_RETURN(const auto backend, kernels::MakeCpuBackend(1));
  KDT_ASSIGN_OR_RETURN(const auto collective, testing::JoinRanks(id, shard));
  std::vector<float> mine = testing::ShardColumns(logits, kRows, kVocab, shard);
  KDT_ASSIGN_OR_RETURN(const auto top, DraftTopK::Create(backend.get(), shard, kVocab, kRows));
  KDT_RETURN_IF_ERROR(
      top->Queue(kernels::MakeTensor(mine.data(), kernels::DType::kF32, kRows, local), k, *collective));
  // The same from more candidates than are asked for.
  *out = top->Merge(kRows, k, 0, kRows, k);
  KDT_RETURN_IF_ERROR(top->Queue(kernels::MakeTensor(mine.data(), kernels::DType::kF32, kRows, local),
                                 kernels::kMaxTopK, *collective));
  const DraftCandidates again = top->Merge(kRows, kernels::kMaxTopK, 2, kRows, k);
  if (!std::equal(again.ids.begin(), again.ids.end(), out->ids.begin() + 2 * k)) {
    return absl::InternalError("the best k differ with the number of candidates");
  }
  return absl::OkStatus();
}

}  // namespace

TEST_CASE("best tokens and log-probabilities over the whole vocabulary, at every group size") {
  std::mt19937 random(4);
  std::vector<float> logits(kRows * kVocab);
  // Few distinct values, so that ties are frequent.
  for (float& logit : logits) logit = static_cast<float>(random() % 40) / 4;
  logits[3 * kVocab + 200] = NAN;
  const int ranks = GENERATE(1, 2, 8);
  const int64_t k = GENERATE(1, 16, 64);
  CAPTURE(ranks, k);
  static int counter = 0;
  const std::string id = absl::StrCat("draft-test-", getpid(), "-", ++counter);
  std::vector<DraftCandidates> results(ranks);
  std::vector<absl::Status> statuses(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] { statuses[rank] = RunRank(rank, ranks, id, logits, k, &results[rank]); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) REQUIRE(status.ok());
  const DraftCandidates& result = results[0];
  REQUIRE(result.k == k);
  for (int64_t row = 0; row < kRows; ++row) {
    CAPTURE(row);
    CHECK(result.bad[row] == (row == 3 ? 1 : 0));
    if (row == 3) continue;
    const float* values = logits.data() + row * kVocab;
    std::vector<int32_t> order(kVocab);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return values[a] > values[b]; });
    double sum = 0;
    for (int64_t i = 0; i < kVocab; ++i) sum += std::exp(static_cast<double>(values[i]));
    for (int64_t j = 0; j < k; ++j) {
      CHECK(result.ids[row * k + j] == order[j]);
      CHECK(std::abs(result.log_probs[row * k + j] - (values[order[j]] - std::log(sum))) < 1e-5);
    }
  }
  for (const DraftCandidates& other : results) CHECK(other.ids == result.ids);
}

}  // namespace kdt
