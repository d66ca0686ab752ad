#include "worker/sampling/truncation.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <set>

#include "common/rng.h"
#include "tests/support/catch.h"

namespace kdt {
namespace {

std::vector<Candidate> Sorted(const std::vector<float>& values) {
  std::vector<Candidate> all;
  for (size_t id = 0; id < values.size(); ++id) all.push_back({static_cast<int32_t>(id), values[id]});
  std::sort(all.begin(), all.end());
  return all;
}

double SumExp(const std::vector<Candidate>& all) {
  double sum = 0;
  for (const Candidate& c : all) sum += std::exp(static_cast<double>(c.value) - all[0].value);
  return sum;
}

// The definition with explicit probabilities.
size_t Naive(const SamplingParams& params, const std::vector<Candidate>& all) {
  size_t kept = params.top_k > 0 ? std::min<size_t>(params.top_k, all.size()) : all.size();
  double total = 0;
  for (size_t i = 0; i < kept; ++i) total += std::exp(static_cast<double>(all[i].value) - all[0].value);
  const auto probability = [&](size_t i) {
    return std::exp(static_cast<double>(all[i].value) - all[0].value) / total;
  };
  if (params.top_p < 1) {
    double sum = 0;
    for (size_t i = 0; i < kept; ++i) {
      sum += probability(i);
      if (sum >= params.top_p) kept = i + 1;
    }
  }
  size_t by_min_p = 1;
  while (by_min_p < kept && probability(by_min_p) >= params.min_p * probability(0)) ++by_min_p;
  return std::min(kept, by_min_p);
}

}  // namespace

TEST_CASE("kept tokens equal the definition; a prefix of the best says so or that it cannot tell") {
  std::mt19937 random(2);
  std::normal_distribution<float> normal(0, 2);
  int unknown = 0;
  for (int c = 0; c < 500; ++c) {
    CAPTURE(c);
    std::vector<float> values(200);
    for (float& value : values) value = normal(random);
    const std::vector<Candidate> all = Sorted(values);
    SamplingParams params;
    params.top_k = c % 2 == 0 ? 0 : 1 + random() % 250;
    params.top_p = c % 3 == 0 ? 1.0f : 0.05f + 0.9f * static_cast<float>(random() % 1000) / 1000;
    params.min_p = c % 5 == 0 ? 0.0f : 0.2f * static_cast<float>(random() % 1000) / 1000;
    const size_t expected = Naive(params, all);
    CHECK(*KeptCount(params, all, 200, SumExp(all)) == static_cast<int64_t>(expected));
    const size_t known = 1 + random() % 64;
    const auto some = KeptCount(params, {all.data(), known}, 200, SumExp(all));
    if (!some) {
      ++unknown;
      // It may only give up when the answer, or the total of top_k, needs more than it knows.
      CHECK((expected >= known || params.top_k > static_cast<int64_t>(known)));
    } else {
      CHECK(*some == static_cast<int64_t>(expected));
    }
  }
  CHECK(unknown > 10);
  CHECK(unknown < 490);
}

TEST_CASE("ties stay with the lower id") {
  const std::vector<Candidate> all = Sorted({1, 3, 3, 3, 0});
  SamplingParams params;
  params.top_k = 2;
  CHECK(*KeptCount(params, all, 5, SumExp(all)) == 2);
  CHECK(all[0].id == 1);
  CHECK(all[1].id == 2);
}

TEST_CASE("masked tokens are never kept") {
  const std::vector<Candidate> all = Sorted({1, -INFINITY, 0.5f, -INFINITY});
  SamplingParams params;
  params.top_k = 4;
  CHECK(*KeptCount(params, all, 4, SumExp(all)) == 2);
}

TEST_CASE("the draw is the argmax of value and keyed noise") {
  const std::vector<Candidate> all = Sorted({0.3f, 0.1f, -0.2f, 0.9f, 0.0f});
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const int64_t position = static_cast<int64_t>(seed * 31);
    int32_t best = -1;
    float value = 0;
    for (const Candidate& c : all) {
      const float v = c.value + GumbelNoise(seed, position, c.id);
      if (best < 0 || v > value) {
        best = c.id;
        value = v;
      }
    }
    CHECK(DrawAmong(all, seed, position) == best);
  }
}

}  // namespace kdt
