// The sampler against a naive one in double precision that sees the whole row, at several group sizes; and
// the distribution of its draws.
#include "worker/sampling/sampler.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/rng.h"
#include "tests/support/catch.h"
#include "tests/support/chi_square.h"
#include "tests/worker/support/vocab_shard.h"

namespace kdt {
namespace {

constexpr int64_t kVocab = 512;

// One request's parameters, history and rows of logits, as all ranks know them.
struct Job {
  SamplingParams params;
  std::vector<int32_t> history;
  std::vector<std::vector<float>> logits;  // a row each
  std::vector<std::vector<int32_t>> paths;
  std::vector<SampledRow> result;  // rank 0's
};

// Runs the jobs' rows as one batch on `ranks` threads.
void RunJobs(std::vector<Job>& jobs, int ranks) {
  static int counter = 0;
  const std::string id = absl::StrCat("sampler-test-", getpid(), "-", ++counter);
  std::vector<std::vector<SampledRow>> results(ranks);
  std::vector<std::string> errors(ranks);
  const auto body = [&](int rank) -> absl::Status {
    const Shard shard{rank, ranks};
    const int64_t local = shard.Count(kVocab);
    const int64_t begin = shard.Begin(kVocab);
    auto backend = kernels::MakeCpuBackend(1);
    if (!backend.ok()) return backend.status();
    const auto collective = testing::JoinRanks(id, shard);
    if (!collective.ok()) return collective.status();
    std::vector<float> values;
    std::vector<SequenceSampling> sequences;
    sequences.reserve(jobs.size());
    std::vector<SampleRow> rows;
    for (const Job& job : jobs) {
      sequences.emplace_back(job.params, begin, local);
      sequences.back().Append(job.history);
      for (size_t i = 0; i < job.logits.size(); ++i) {
        values.insert(values.end(), job.logits[i].begin() + begin, job.logits[i].begin() + begin + local);
        SampleRow row;
        row.sequence = &sequences.back();
        row.path = job.paths[i];
        row.position = static_cast<int64_t>(job.history.size() + job.paths[i].size());
        row.top = job.params.logprobs > 0 ? job.params.logprobs : -1;
        rows.push_back(row);
      }
    }
    const auto count = static_cast<int64_t>(rows.size());
    auto sampler = Sampler::Create(backend->get(), shard, kVocab, count);
    if (!sampler.ok()) return sampler.status();
    return (*sampler)->Sample(kernels::MakeTensor(values.data(), kernels::DType::kF32, count, local), rows,
                              **collective, &results[rank]);
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] { errors[rank] = std::string(body(rank).message()); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) REQUIRE(error.empty());
  size_t next = 0;
  for (Job& job : jobs) {
    for (size_t i = 0; i < job.logits.size(); ++i, ++next) {
      for (int rank = 1; rank < ranks; ++rank) REQUIRE(results[rank][next].token == results[0][next].token);
      job.result.push_back(results[0][next]);
    }
  }
}

struct Naive {
  std::vector<double> scaled;  // adjusted logits / T, -infinity when cut
  double log_sum_exp;          // of the raw ones
};

Naive Reference(const Job& job, size_t row) {
  const SamplingParams& params = job.params;
  std::vector<float> adjusted = job.logits[row];
  SequenceSampling sequence(params, 0, kVocab);
  sequence.Append(job.history);
  LogitEditor(0, kVocab).Apply(sequence, job.paths[row],
                               static_cast<int64_t>(job.history.size() + job.paths[row].size()),
                               adjusted.data());
  Naive naive;
  double sum = 0;
  for (float logit : job.logits[row]) sum += std::exp(static_cast<double>(logit));
  naive.log_sum_exp = std::log(sum);
  std::vector<int32_t> order(kVocab);
  for (int32_t id = 0; id < kVocab; ++id) order[id] = id;
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return adjusted[a] > adjusted[b]; });
  naive.scaled.assign(kVocab, -INFINITY);
  if (params.Greedy()) {
    naive.scaled[order[0]] = 0;
    return naive;
  }
  std::vector<double> p(kVocab);
  double total = 0;
  const size_t limit = params.top_k > 0 ? params.top_k : kVocab;
  for (size_t i = 0; i < limit; ++i) {
    p[i] = std::exp((static_cast<double>(adjusted[order[i]]) - adjusted[order[0]]) / params.temperature);
    total += p[i];
  }
  double cumulative = 0;
  for (size_t i = 0; i < limit; ++i) {
    if (i > 0 && (cumulative >= params.top_p * total || p[i] < params.min_p * p[0])) break;
    naive.scaled[order[i]] = static_cast<double>(adjusted[order[i]]) / params.temperature;
    cumulative += p[i];
  }
  return naive;
}

Job RandomJob(std::mt19937_64& random) {
  std::normal_distribution<float> normal(0, 2);
  const auto coin = [&random] { return random() % 2 == 0; };
  Job job;
  constexpr float kTemperatures[] = {0.0f, 0.6f, 1.0f, 1.5f, 3.0f};
  job.params.temperature = kTemperatures[random() % 5];
  job.params.top_k = coin() ? 0 : (coin() ? 1 + random() % 60 : 65 + random() % 300);
  job.params.top_p = coin() ? 1.0f : (coin() ? 0.5f : 0.97f);
  job.params.min_p = coin() ? 0.0f : 0.02f;
  job.params.repetition_penalty = coin() ? 1.0f : 1.4f;
  job.params.frequency_penalty = coin() ? 0.0f : 0.5f;
  if (coin()) job.params.logit_bias = {{11, 4.0f}, {400, -4.0f}};
  job.params.seed = random();
  job.params.prompt_length = 4;
  job.params.min_tokens = coin() ? 0 : 20;
  job.params.stop_token_ids = {1, 300};
  job.params.logprobs = coin() ? 0 : 1 + random() % 60;
  job.history.resize(8);
  for (int32_t& token : job.history) token = static_cast<int32_t>(random() % kVocab);
  for (int i = 0; i < 4; ++i) {
    job.paths.emplace_back();
    for (int depth = 0; depth <= i; ++depth)
      job.paths.back().push_back(static_cast<int32_t>(random() % kVocab));
    job.logits.emplace_back(kVocab);
    for (float& logit : job.logits.back()) logit = normal(random);
  }
  return job;
}

}  // namespace

TEST_CASE("draws and log-probabilities equal the naive sampler's at every group size") {
  std::mt19937_64 random(11);
  std::vector<Job> jobs;
  for (int i = 0; i < 60; ++i) jobs.push_back(RandomJob(random));
  std::vector<std::vector<SampledRow>> first;
  for (int ranks : {1, 2, 8}) {
    CAPTURE(ranks);
    for (Job& job : jobs) job.result.clear();
    RunJobs(jobs, ranks);
    for (size_t j = 0; j < jobs.size(); ++j) {
      CAPTURE(j);
      const Job& job = jobs[j];
      for (size_t row = 0; row < job.result.size(); ++row) {
        const SampledRow& result = job.result[row];
        REQUIRE(!result.bad);
        const Naive naive = Reference(job, row);
        // The token is kept, and none that is kept beats it by more than rounding.
        REQUIRE(naive.scaled[result.token] > -INFINITY);
        const int64_t position = static_cast<int64_t>(job.history.size() + job.paths[row].size());
        const auto noisy = [&](int32_t id) {
          return naive.scaled[id] + (job.params.Greedy() ? 0.0 : GumbelNoise(job.params.seed, position, id));
        };
        for (int32_t id = 0; id < kVocab; ++id) {
          if (naive.scaled[id] > -INFINITY) CHECK(noisy(id) <= noisy(result.token) + 1e-4);
        }
        if (job.params.logprobs == 0) continue;
        CHECK(std::abs(result.logprob - (job.logits[row][result.token] - naive.log_sum_exp)) < 1e-4);
        REQUIRE(result.top.size() == static_cast<size_t>(job.params.logprobs));
        for (size_t k = 0; k < result.top.size(); ++k) {
          const auto [id, logprob] = result.top[k];
          CHECK(std::abs(logprob - (job.logits[row][id] - naive.log_sum_exp)) < 1e-4);
          if (k > 0) CHECK(result.top[k - 1].second >= logprob);
        }
      }
      if (ranks == 1) {
        first.push_back(job.result);
      } else {
        for (size_t row = 0; row < job.result.size(); ++row)
          CHECK(job.result[row].token == first[j][row].token);
      }
    }
  }
}

TEST_CASE("draws follow the probabilities") {
  // 8000 positions of one distribution, drawn with 8 seeds; chi-square at the 0.1% level.
  std::mt19937_64 random(13);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> logits(kVocab, -30);
  constexpr int kLive = 20;
  for (int i = 0; i < kLive; ++i) logits[i * 25] = normal(random);
  const float temperature = GENERATE(0.7f, 1.0f, 1.6f);
  const bool truncated = GENERATE(false, true);
  CAPTURE(temperature, truncated);
  std::vector<Job> jobs;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    Job job;
    job.params.temperature = temperature;
    job.params.seed = random();
    if (truncated) job.params.top_k = 12;
    for (int i = 0; i < 1000; ++i) {
      job.logits.push_back(logits);
      job.paths.emplace_back(i);
    }
    jobs.push_back(job);
  }
  RunJobs(jobs, 2);
  std::vector<double> counts(kVocab);
  for (const Job& job : jobs) {
    for (const SampledRow& row : job.result) ++counts[row.token];
  }
  const Naive naive = Reference(jobs[0], 0);
  double total = 0;
  for (double value : naive.scaled) total += std::exp(value);
  std::vector<double> observed;
  std::vector<double> expected;
  double rare_observed = 0;
  double rare_expected = 0;
  for (int32_t id = 0; id < kVocab; ++id) {
    const double e = 8000 * std::exp(naive.scaled[id]) / total;
    if (naive.scaled[id] == -INFINITY) CHECK(counts[id] == 0);
    if (e < 5) {
      rare_observed += counts[id];
      rare_expected += e;
      continue;
    }
    observed.push_back(counts[id]);
    expected.push_back(e);
  }
  if (rare_expected >= 5) {
    observed.push_back(rare_observed);
    expected.push_back(rare_expected);
  }
  CHECK(testing::ChiSquarePValue(observed, expected) > 0.001);
}

TEST_CASE("rows with a NaN or nothing to draw are bad, their neighbours are not") {
  std::vector<Job> jobs(3);
  for (Job& job : jobs) {
    job.params.temperature = 0.9f;
    job.params.top_p = 0.9f;
    job.logits.emplace_back(kVocab, 0.5f);
    job.paths.emplace_back();
  }
  jobs[0].logits[0][77] = NAN;
  jobs[1].params.min_tokens = 5;
  for (int32_t id = 0; id < kVocab; ++id) jobs[1].params.stop_token_ids.push_back(id);
  const int ranks = GENERATE(1, 4);
  RunJobs(jobs, ranks);
  CHECK(jobs[0].result[0].bad);
  CHECK(jobs[1].result[0].bad);
  CHECK(!jobs[2].result[0].bad);
}

}  // namespace kdt
