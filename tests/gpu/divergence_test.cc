// The comparison itself, on streams made by hand.
#include "tests/gpu/divergence.h"

#include <cmath>

#include "common/rng.h"
#include "tests/support/catch.h"

namespace kdt::testing {
namespace {

v1::PositionLogprobs Position(std::vector<std::pair<uint32_t, float>> tokens) {
  v1::PositionLogprobs position;
  for (const auto& [id, logprob] : tokens) {
    v1::TokenLogprob* top = position.add_top();
    top->set_token_id(id);
    top->set_logprob(logprob);
  }
  *position.mutable_token() = position.top(0);
  return position;
}

PlannedRequest Greedy() {
  PlannedRequest planned;
  planned.kind = "greedy";
  planned.request.mutable_token_ids()->add_ids(1);
  planned.request.mutable_token_ids()->add_ids(2);
  planned.request.mutable_sampling()->set_temperature(0);
  return planned;
}

Stream Expected() {
  Stream stream;
  stream.tokens = {10, 11, 12};
  stream.logprobs = {Position({{10, -0.1F}, {20, -3}}), Position({{11, -0.5F}, {21, -0.75F}}),
                     Position({{12, -0.2F}, {22, -2}})};
  return stream;
}

}  // namespace

TEST_CASE("equal streams: all tokens are compared and none differs") {
  Comparison comparison;
  Compare({Greedy()}, {Expected()}, {Expected()}, nullptr, &comparison);
  CHECK(comparison.tokens == 3);
  CHECK(comparison.divergences.empty());
  CHECK(comparison.errors.empty());
  CHECK(comparison.LargestGap() == 0);
  CHECK(comparison.Beyond(0) == 0);
  CHECK(comparison.logprob_errors == std::vector<double>{0, 0, 0});
}

TEST_CASE("the first difference counts, with its gap, and nothing behind it") {
  Stream got = Expected();
  got.logprobs.clear();
  got.tokens = {10, 21, 99};
  Comparison comparison;
  Compare({Greedy()}, {Expected()}, {got}, nullptr, &comparison);
  CHECK(comparison.tokens == 2);
  REQUIRE(comparison.divergences.size() == 1);
  CHECK(comparison.divergences[0].index == 1);
  CHECK(comparison.divergences[0].expected == 11);
  CHECK(comparison.divergences[0].got == 21);
  CHECK(comparison.divergences[0].gap == Catch::Approx(0.25));
  CHECK(comparison.Beyond(0.3) == 0);
  CHECK(comparison.Beyond(0.25) == 1);
}

TEST_CASE("a token outside the list is asked for, and beyond every tolerance when nobody knows it") {
  Stream got = Expected();
  got.tokens[1] = 77;
  Comparison unknown;
  Compare({Greedy()}, {Expected()}, {got}, nullptr, &unknown);
  CHECK(unknown.Beyond(1e9) == 1);
  CHECK(std::isinf(unknown.LargestGap()));

  const Probe probe = [](const std::vector<uint32_t>& prefix, uint32_t token) -> std::optional<double> {
    CHECK(prefix == std::vector<uint32_t>{1, 2, 10});
    CHECK(token == 77);
    return -1.5;
  };
  Comparison comparison;
  Compare({Greedy()}, {Expected()}, {got}, probe, &comparison);
  CHECK(comparison.LargestGap() == Catch::Approx(1));
}

TEST_CASE("scores hold the noise of seed and position, scaled to logits, and the penalties") {
  v1::GenerateRequest request = Greedy().request;
  CHECK(Score(request, {5, 5, 6}, 5, -1.0) == -1.0);
  request.mutable_sampling()->set_frequency_penalty(0.3F);
  request.mutable_sampling()->set_presence_penalty(0.2F);
  CHECK(Score(request, {5, 5, 6}, 5, -1.0) == Catch::Approx(-1.8));
  CHECK(Score(request, {5, 5, 6}, 7, -1.0) == -1.0);
  request.mutable_sampling()->set_temperature(0.5F);
  request.mutable_sampling()->set_seed(9);
  // Two prompt tokens and three generated ones: the next stands at position 5.
  CHECK(Score(request, {5, 5, 6}, 7, -1.0) == Catch::Approx(-1 + 0.5 * GumbelNoise(9, 5, 7)));
}

TEST_CASE("failed and short streams are errors") {
  Stream failed;
  failed.error = "UNAVAILABLE";
  Stream short_one = Expected();
  short_one.tokens.pop_back();
  Comparison comparison;
  Compare({Greedy(), Greedy()}, {Expected(), Expected()}, {failed, short_one}, nullptr, &comparison);
  CHECK(comparison.errors.size() == 2);
  CHECK(comparison.tokens == 2);
}

}  // namespace kdt::testing
