// The draw on the device is the sampler's, for every row that it may take.
#include "worker/sampling/argmax_draw.h"

#include <unistd.h>

#include <cmath>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "tests/support/catch.h"
#include "tests/worker/support/vocab_shard.h"

namespace kdt {
namespace {

constexpr int64_t kVocab = 512;
constexpr int64_t kRows = 11;
constexpr int64_t kQueued = 16;  // padding behind

struct Drawn {
  std::vector<SampledRow> fast, general;
};

absl::Status RunRank(int rank, int ranks, const std::string& id, const std::vector<float>& logits,
                     Drawn* out) {
  const Shard shard{rank, ranks};
  const int64_t local = shard.Count(kVocab);
  KDT_ASSIGN_OR_RETURN(const auto backend, kernels::MakeCpuBackend(1));
  KDT_ASSIGN_OR_RETURN(const auto collective, testing::JoinRanks(id, shard));
  std::vector<float> mine = testing::ShardColumns(logits, kQueued, kVocab, shard);
  std::vector<SequenceSampling> sequences;
  std::vector<SampleRow> rows(kRows);
  std::vector<float> temperature(kQueued, 0);
  std::vector<uint64_t> seed(kQueued, 0);
  std::vector<int64_t> position(kQueued, 0);
  for (int64_t i = 0; i < kRows; ++i) {
    SamplingParams params;
    params.temperature = i % 3 == 0 ? 0.0f : 0.4f * static_cast<float>(i);
    params.seed = 77 * i;
    sequences.emplace_back(params, shard.Begin(kVocab), local);
  }
  for (int64_t i = 0; i < kRows; ++i) {
    rows[i].sequence = &sequences[i];
    rows[i].position = 1000 + i;
    if (!DrawsByArgmax(rows[i])) return absl::InternalError("a plain row is refused");
    temperature[i] = sequences[i].params().temperature;
    seed[i] = sequences[i].params().seed;
    position[i] = rows[i].position;
  }
  KDT_ASSIGN_OR_RETURN(const auto draw, ArgmaxDraw::Create(backend.get(), shard, kVocab, kQueued));
  KDT_RETURN_IF_ERROR(draw->Queue(kernels::MakeTensor(mine.data(), kernels::DType::kF32, kQueued, local),
                                  {temperature.data(), seed.data(), position.data()}, *collective));
  draw->Merge(kQueued, kRows, &out->fast);
  KDT_ASSIGN_OR_RETURN(const auto sampler, Sampler::Create(backend.get(), shard, kVocab, kRows));
  return sampler->Sample(kernels::MakeTensor(mine.data(), kernels::DType::kF32, kRows, local), rows,
                         *collective, &out->general);
}

}  // namespace

TEST_CASE("argmax draws on the device are the sampler's, ties, masks and broken rows included") {
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> logits(kQueued * kVocab);
  for (float& value : logits) value = normal(random);
  for (int64_t i = 0; i < kVocab; ++i) logits[3 * kVocab + i] = static_cast<float>(i % 5);  // ties
  logits[5 * kVocab + 400] = NAN;
  logits[6 * kVocab + 2] = INFINITY;
  for (int64_t i = 0; i < kVocab; ++i) logits[(kRows + 1) * kVocab + i] = NAN;  // padding
  for (const int ranks : {1, 2, 4}) {
    CAPTURE(ranks);
    const std::string id = absl::StrCat("argmax-test-", getpid(), "-", ranks);
    std::vector<Drawn> drawn(ranks);
    std::vector<absl::Status> statuses(ranks);
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; ++r) {
      threads.emplace_back([&, r] { statuses[r] = RunRank(r, ranks, id, logits, &drawn[r]); });
    }
    for (std::thread& thread : threads) thread.join();
    for (int r = 0; r < ranks; ++r) {
      REQUIRE(statuses[r].ok());
      for (int64_t i = 0; i < kRows; ++i) {
        CAPTURE(i);
        CHECK(drawn[r].fast[i].bad == (i == 5 || i == 6));
        CHECK(drawn[r].fast[i].bad == drawn[r].general[i].bad);
        if (!drawn[r].fast[i].bad) CHECK(drawn[r].fast[i].token == drawn[r].general[i].token);
      }
    }
  }
}

TEST_CASE("rows that need more than an argmax are the sampler's") {
  const auto draws = [](const SamplingParams& params, int64_t top, int64_t position) {
    const SequenceSampling sequence(params, 0, kVocab);
    SampleRow row;
    row.sequence = &sequence;
    row.top = top;
    row.position = position;
    return DrawsByArgmax(row);
  };
  SamplingParams params;
  CHECK(draws(params, -1, 5));
  CHECK_FALSE(draws(params, 0, 5));  // a logprob
  params.top_p = 0.9f;
  CHECK_FALSE(draws(params, -1, 5));
  params.temperature = 0;  // the best token always stays
  CHECK(draws(params, -1, 5));
  params.logit_bias = {{3, 1.0f}};
  CHECK_FALSE(draws(params, -1, 5));
  params.logit_bias.clear();
  params.frequency_penalty = 1;
  CHECK_FALSE(draws(params, -1, 5));
  params.frequency_penalty = 0;
  params.min_tokens = 4;
  params.stop_token_ids = {7};
  CHECK_FALSE(draws(params, -1, 3));
  CHECK(draws(params, -1, 4));
  SampleRow given;
  given.given = 3;
  CHECK_FALSE(DrawsByArgmax(given));
}

}  // namespace kdt
