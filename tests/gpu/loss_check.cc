#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

#include "tests/gpu/checks.h"

namespace kdt::testing {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kRequests = 8;
constexpr uint32_t kTokens = 200;
constexpr uint64_t kTokensBeforeKill = 400;  // of all streams together
constexpr std::chrono::seconds kPatience{90};

// Times since the kill, in seconds; negative: it did not happen.
struct Timeline {
  std::atomic<double> noticed{-1}, serving{-1}, first_token{-1};
};

// Watches until the group serves again and a token has come.
void Watch(v1::Generation::Stub& stub, Clock::time_point killed, const std::atomic<uint64_t>& seen,
           Timeline* timeline) {
  const auto since = [killed] { return std::chrono::duration<double>(Clock::now() - killed).count(); };
  uint64_t seen_when_serving = 0;
  while (Clock::now() - killed < kPatience) {
    v1::ClusterInfo info;
    grpc::ClientContext context;
    if (stub.GetClusterInfo(&context, {}, &info).ok()) {
      if (timeline->noticed < 0 && !info.serving()) timeline->noticed = since();
      if (timeline->noticed >= 0 && timeline->serving < 0 && info.serving()) {
        timeline->serving = since();
        seen_when_serving = seen;
      }
    }
    if (timeline->serving >= 0 && seen > seen_when_serving) {
      timeline->first_token = since();
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

nlohmann::json CheckLoss(const CheckOptions& options, const Reference& reference) {
  nlohmann::json result = {{"ok", false}, {"failures", nlohmann::json::array()}};
  nlohmann::json& failures = result["failures"];
  const auto requests = PlanRequests(reference.stub(), options.prompts_file, kRequests, kTokens, 5000);
  const auto tree = ParseSpeculation("tree 16");
  ServedGroupOptions subject = options.subject;
  subject.flags.insert(subject.flags.begin(), "--on_loss=restart");
  const auto group = ServedGroup::Start(subject);
  if (!requests.ok() || !group.ok()) {
    failures.push_back(requests.ok() ? group.status().ToString() : requests.status().ToString());
    return result;
  }
  const std::vector<Stream> expected = reference.Run(*requests);
  const std::vector<pid_t> workers = (*group)->WorkerPids();
  if (workers.size() != static_cast<size_t>(subject.tp)) {
    failures.push_back("the launcher has " + std::to_string(workers.size()) + " workers");
    return result;
  }

  std::atomic<uint64_t> seen{0};
  std::vector<Stream> got;
  std::atomic<bool> ended{false};
  std::thread clients([&] {
    got = RunStreams((*group)->stub(), *requests, *tree, kRequests, 0, &seen);
    ended = true;
  });
  while (seen < kTokensBeforeKill && !ended) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const uint64_t seen_at_kill = seen;
  const auto killed = Clock::now();
  kill(workers.back(), SIGKILL);
  Timeline timeline;
  std::thread watch([&] { Watch((*group)->stub(), killed, seen, &timeline); });
  clients.join();
  watch.join();

  Comparison comparison;
  Compare(*requests, expected, got, reference.probe(), &comparison);
  result["streams"] =
      Report("tp " + std::to_string(subject.tp) + ", rank killed", comparison, options.tolerance, &failures);
  result["tokens_at_kill"] = seen_at_kill;
  result["noticed_seconds"] = timeline.noticed.load();
  result["serving_seconds"] = timeline.serving.load();
  result["first_token_seconds"] = timeline.first_token.load();
  std::printf("  noticed after %.3f s, serving after %.2f s, next token after %.2f s\n",
              timeline.noticed.load(), timeline.serving.load(), timeline.first_token.load());
  if (timeline.noticed < 0) failures.push_back("the loss was not noticed while streams ran");
  if (timeline.first_token < 0) failures.push_back("no token came behind the loss");
  if (!failures.empty()) result["log"] = (*group)->Log();
  result["ok"] = failures.empty();
  return result;
}

}  // namespace kdt::testing
