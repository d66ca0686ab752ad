#include <algorithm>
#include <chrono>
#include <cstdio>

#include "tests/gpu/checks.h"

namespace kdt::testing {
namespace {

constexpr uint32_t kReferenceLogprobs = 10;

double Seconds(std::chrono::steady_clock::time_point since) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
}

nlohmann::json Quantiles(std::vector<double> values) {
  if (values.empty()) return nullptr;
  std::sort(values.begin(), values.end());
  const auto at = [&values](double q) {
    return values[static_cast<size_t>(q * static_cast<double>(values.size() - 1))];
  };
  return {{"count", values.size()}, {"median", at(0.5)}, {"p99", at(0.99)}, {"largest", values.back()}};
}

}  // namespace

std::vector<Stream> Reference::Run(const std::vector<PlannedRequest>& requests) const {
  Speculation off{"off", {}};
  off.params.set_mode(v1::SpeculationParams::OFF);
  return RunStreams(group_->stub(), requests, off, concurrency_, kReferenceLogprobs);
}

nlohmann::json Report(const std::string& name, const Comparison& comparison, double tolerance,
                      nlohmann::json* failures) {
  const double rate = comparison.tokens == 0 ? 0
                                             : 1e4 * static_cast<double>(comparison.divergences.size()) /
                                                   static_cast<double>(comparison.tokens);
  const size_t beyond = comparison.Beyond(tolerance);
  std::printf("%-22s %9llu %8zu %10.1f %11.4f %7zu %7zu %8llu %8llu\n", name.c_str(),
              static_cast<unsigned long long>(comparison.tokens), comparison.divergences.size(), rate,
              comparison.LargestGap(), beyond, comparison.errors.size(),
              static_cast<unsigned long long>(comparison.drafted),
              static_cast<unsigned long long>(comparison.accepted));
  std::fflush(stdout);
  nlohmann::json gaps = nlohmann::json::array();
  for (const Divergence& d : comparison.divergences) {
    gaps.push_back({{"request", d.request},
                    {"kind", d.kind},
                    {"index", d.index},
                    {"expected", d.expected},
                    {"got", d.got},
                    {"gap", d.gap}});
  }
  if (beyond > 0) {
    failures->push_back(name + ": " + std::to_string(beyond) + " divergences beyond the tolerance");
  }
  for (const std::string& error : comparison.errors) failures->push_back(name + ": " + error);
  return {{"name", name},
          {"requests", comparison.requests},
          {"tokens", comparison.tokens},
          {"rounds", comparison.rounds},
          {"drafted", comparison.drafted},
          {"accepted", comparison.accepted},
          {"divergences", comparison.divergences.size()},
          {"per_10000_tokens", rate},
          {"largest_gap", comparison.LargestGap()},
          {"beyond_tolerance", beyond},
          {"logprob_errors", Quantiles(comparison.logprob_errors)},
          {"gaps", std::move(gaps)}};
}

nlohmann::json CheckDivergence(const CheckOptions& options, const Reference& reference) {
  nlohmann::json result = {{"ok", false}, {"failures", nlohmann::json::array()}};
  const auto requests =
      PlanRequests(reference.stub(), options.prompts_file, options.requests, options.tokens, 1000);
  if (!requests.ok()) {
    result["failures"].push_back(requests.status().ToString());
    return result;
  }
  const std::vector<Stream> expected = reference.Run(*requests);
  for (const Stream& stream : expected) {
    if (!stream.error.empty()) result["failures"].push_back("reference: " + stream.error);
  }
  auto started = std::chrono::steady_clock::now();
  const auto group = ServedGroup::Start(options.subject);
  if (!group.ok()) {
    result["failures"].push_back(group.status().ToString());
    return result;
  }
  result["start_seconds"] = Seconds(started);
  Comparison all;
  for (const Speculation& setting : options.settings) {
    started = std::chrono::steady_clock::now();
    const std::vector<Stream> got = RunStreams((*group)->stub(), *requests, setting, options.concurrency, 0);
    const double seconds = Seconds(started);
    Comparison comparison;
    Compare(*requests, expected, got, reference.probe(), &comparison);
    nlohmann::json report = Report("tp " + std::to_string(options.subject.tp) + ", " + setting.name,
                                   comparison, options.tolerance, &result["failures"]);
    report["seconds"] = seconds;
    // Trees that never bring anything are a broken drafter, whatever the tokens are.
    if (!options.subject.drafter.empty() && setting.name != "off" &&
        comparison.accepted * 10 < comparison.tokens) {
      result["failures"].push_back(setting.name + ": too few drafted tokens are accepted");
    }
    result["settings"].push_back(std::move(report));
  }
  result["ok"] = result["failures"].empty();
  return result;
}

}  // namespace kdt::testing
