#include <algorithm>
#include <cstdio>
#include <regex>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/gpu/checks.h"
#include "tests/support/http.h"

namespace kdt::testing {
namespace {

constexpr int kValidateEvery = 4;

// Metrics ports of the workers, from the lines in which they tell them.
std::vector<int> WorkerMetricsPorts(const std::string& log) {
  static const std::regex line(R"(\[worker \d+\] metrics on [^\s:]+:(\d+))");
  std::vector<int> ports;
  for (std::sregex_iterator it(log.begin(), log.end(), line), end; it != end; ++it) {
    ports.push_back(std::stoi((*it)[1]));
  }
  return ports;
}

}  // namespace

nlohmann::json CheckValidate(const CheckOptions& options, const Reference& reference) {
  nlohmann::json result = {{"ok", false}, {"failures", nlohmann::json::array()}};
  nlohmann::json& failures = result["failures"];
  ServedGroupOptions subject = options.subject;
  subject.flags.insert(subject.flags.begin(), "--metrics_port=0");
  if (std::find(subject.flags.begin(), subject.flags.end(), "--") == subject.flags.end()) {
    subject.flags.push_back("--");
  }
  subject.flags.push_back("--attention=validate");
  subject.flags.push_back(absl::StrCat("--validate_every=", kValidateEvery));
  const auto group = ServedGroup::Start(subject);
  const auto requests =
      PlanRequests(reference.stub(), options.prompts_file, options.requests / 2 + 1, options.tokens, 30000);
  const auto tree = ParseSpeculation("tree 16");
  if (!group.ok() || !requests.ok()) {
    failures.push_back(group.ok() ? requests.status().ToString() : group.status().ToString());
    return result;
  }
  const std::vector<Stream> expected = reference.Run(*requests);
  const std::vector<Stream> got = RunStreams((*group)->stub(), *requests, *tree, options.concurrency, 0);
  Comparison comparison;
  Compare(*requests, expected, got, reference.probe(), &comparison);
  result["streams"] =
      Report(absl::StrCat("tp ", subject.tp, ", validate"), comparison, options.tolerance, &failures);
  const std::vector<int> ports = WorkerMetricsPorts((*group)->Log());
  if (ports.size() != static_cast<size_t>(subject.tp))
    failures.push_back("not every rank told its metrics port");
  for (const int port : ports) {
    nlohmann::json rank;
    const absl::StatusOr<std::string> metrics = HttpGet(port, "/metrics");
    if (!metrics.ok()) failures.push_back(std::string(metrics.status().message()));
    for (absl::string_view line : absl::StrSplit(metrics.value_or(""), '\n')) {
      const size_t space = line.rfind(' ');
      if (line.rfind("kdt_worker_attention_", 0) != 0 || space == std::string::npos) continue;
      rank[std::string(line.substr(0, space))] = std::stod(std::string(line.substr(space)));
      std::printf("  %.*s\n", static_cast<int>(line.size()), line.data());
    }
    if (rank.empty()) failures.push_back(absl::StrCat("no series of attention on port ", port));
    for (const auto& [name, value] : rank.items()) {
      if (name.find("checked_values") != std::string::npos && value.get<double>() <= 0) {
        failures.push_back("validate compared nothing");
      }
    }
    result["ranks"].push_back(std::move(rank));
  }
  result["ok"] = failures.empty();
  return result;
}

}  // namespace kdt::testing
