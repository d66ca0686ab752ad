#include <algorithm>
#include <cmath>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "tests/gpu/checks.h"

namespace kdt::testing {
namespace {

constexpr size_t kWorstShown = 12;

struct PositionError {
  double error = 0;
  size_t request = 0;
  size_t position = 0;  // of the token whose log-probability it is
  size_t length = 0;    // of the prompt
  double expected = 0, got = 0;
};

// Log-probabilities of the prompt's tokens behind the first; the error's text otherwise.
std::string PromptLogprobs(v1::Generation::Stub& stub, v1::GenerateRequest request,
                           std::vector<double>* logprobs) {
  request.mutable_stop()->set_max_tokens(1);
  request.mutable_output()->set_prompt_logprobs(1);
  grpc::ClientContext context;
  auto reader = stub.Generate(&context, request);
  v1::GenerateResponse response;
  while (reader->Read(&response)) {
    for (const v1::PositionLogprobs& position : response.complete().prompt_logprobs()) {
      logprobs->push_back(position.token().logprob());
    }
  }
  return reader->Finish().error_message();
}

}  // namespace

nlohmann::json CheckPrompts(const CheckOptions& options, const Reference& reference) {
  nlohmann::json result = {{"ok", false}, {"failures", nlohmann::json::array()}};
  nlohmann::json& failures = result["failures"];
  const auto requests =
      PlanRequests(reference.stub(), options.prompts_file, options.requests, options.tokens, 1000);
  const auto group = ServedGroup::Start(options.subject);
  if (!group.ok() || !requests.ok()) {
    failures.push_back(group.ok() ? requests.status().ToString() : group.status().ToString());
    return result;
  }
  std::vector<PositionError> errors;
  for (size_t r = 0; r < requests->size(); ++r) {
    std::vector<double> expected, got;
    const std::string wrong = PromptLogprobs(reference.stub(), (*requests)[r].request, &expected);
    const std::string failed = PromptLogprobs((*group)->stub(), (*requests)[r].request, &got);
    if (!wrong.empty() || !failed.empty() || expected.size() != got.size()) {
      failures.push_back(absl::StrCat("request ", r, ": ", wrong, failed, " ", got.size(), " instead of ",
                                      expected.size(), " log-probabilities"));
      continue;
    }
    for (size_t i = 0; i < expected.size(); ++i) {
      const double error = std::abs(expected[i] - got[i]);
      errors.push_back(
          {std::isfinite(error) ? error : 1e9, r, i + 1, expected.size() + 1, expected[i], got[i]});
    }
  }
  std::sort(errors.begin(), errors.end(),
            [](const PositionError& a, const PositionError& b) { return a.error > b.error; });
  if (errors.empty()) return result;
  const auto quantile = [&errors](double q) {
    return errors[static_cast<size_t>((1 - q) * static_cast<double>(errors.size() - 1))].error;
  };
  std::printf(
      "tp %d, prompts: %zu log-probabilities, errors: median %.5f, p99 %.4f, p99.9 %.4f, largest %.4f\n",
      options.subject.tp, errors.size(), quantile(0.5), quantile(0.99), quantile(0.999), errors[0].error);
  for (size_t i = 0; i < std::min(kWorstShown, errors.size()); ++i) {
    const PositionError& e = errors[i];
    std::printf("  request %zu, position %zu of %zu: %.4f instead of %.4f\n", e.request, e.position, e.length,
                e.got, e.expected);
    result["worst"].push_back({{"request", e.request},
                               {"position", e.position},
                               {"length", e.length},
                               {"expected", e.expected},
                               {"got", e.got}});
  }
  result["values"] = errors.size();
  result["median"] = quantile(0.5);
  result["p99"] = quantile(0.99);
  result["largest"] = errors[0].error;
  result["ok"] = failures.empty();
  return result;
}

}  // namespace kdt::testing
