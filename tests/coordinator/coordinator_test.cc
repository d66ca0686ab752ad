// kdt-coordinator as a process, with toy ranks in this one: how it stops, and what it refuses.
#include <grpcpp/grpcpp.h>
#include <signal.h>

#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "common/process.h"
#include "kdt/v1/generation.grpc.pb.h"
#include "tests/coordinator/group/fake_worker.h"
#include "tests/support/catch.h"
#include "tests/support/requests.h"

namespace kdt::testing {
namespace {

constexpr int kTp = 2;
constexpr int kStartMs = 60000;
constexpr int kStopMs = 15000;

bool Becomes(const std::function<bool()>& condition) {
  for (int i = 0; i < 3000 && !condition(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  return condition();
}

// Slow enough for a test to act while a request runs.
uint32_t NextToken(std::span<const uint32_t> history) {
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  return static_cast<uint32_t>(history.size() % 700);
}

struct Group {
  explicit Group(const std::vector<std::string>& flags) : dir(*MakeTempDir("kdt-test-")) {
    ChildProcess::Options options;
    options.name = "kdt-coordinator";
    options.argv = {std::string(KDT_BIN_DIR) + "/kdt-coordinator",
                    std::string("--model=") + KDT_GOLDENS_DIR + "/model", "--listen=127.0.0.1:0",
                    "--on_group_loss=rejoin"};
    std::string addresses = "--workers=";
    ToyOptions toy;
    toy.next = NextToken;
    for (uint32_t rank = 0; rank < kTp; ++rank) {
      const std::string address = "unix:" + dir + "/rank" + std::to_string(rank) + ".sock";
      addresses += (rank > 0 ? "," : "") + address;
      workers.push_back(std::make_unique<FakeWorker>(address, rank, kTp, toy));
    }
    options.argv.push_back(addresses);
    options.argv.insert(options.argv.end(), flags.begin(), flags.end());
    options.capture_stdout = true;
    options.stderr_path = dir + "/log";
    auto started = ChildProcess::Start(options);
    REQUIRE(started.ok());
    coordinator.emplace(*std::move(started));
  }
  ~Group() {
    coordinator.reset();  // a request that hangs ends with it
    if (client.joinable()) client.join();
    workers.clear();
    RemoveTree(dir);
  }

  // Until it serves, with a request that the ranks work on; it ends with the coordinator at the latest.
  void RunRequest(uint32_t tokens) {
    const std::string prefix = "kdt-coordinator ready listen=";
    const auto line = coordinator->WaitForLine(prefix, kStartMs);
    INFO(Log());
    REQUIRE(line.ok());
    stub = v1::Generation::NewStub(
        grpc::CreateChannel(line->substr(prefix.size()), grpc::InsecureChannelCredentials()));
    client = std::thread([this, tokens] {
      grpc::ClientContext context;
      const auto reader = stub->Generate(&context, GreedyRequest(kShortPrompt, tokens));
      v1::GenerateResponse response;
      while (reader->Read(&response)) generated += response.chunk().token_ids_size();
      status = reader->Finish();
    });
    REQUIRE(Becomes([this] { return Info().running() == 1; }));
  }
  v1::ClusterInfo Info() const {
    v1::ClusterInfo info;
    grpc::ClientContext context;
    stub->GetClusterInfo(&context, {}, &info);
    return info;
  }
  std::string Log() const {
    std::ostringstream text;
    text << std::ifstream(dir + "/log").rdbuf();
    return text.str();
  }
  bool Logged(const std::string& text) const { return Log().find(text) != std::string::npos; }
  void SetReady(int rank, bool ready) {
    const std::lock_guard lock(workers[rank]->description_mutex);
    workers[rank]->description.set_ready(ready);
  }

  const std::string dir;
  std::vector<std::unique_ptr<FakeWorker>> workers;
  std::optional<ChildProcess> coordinator;
  std::unique_ptr<v1::Generation::Stub> stub;
  std::thread client;
  int generated = 0;
  grpc::Status status;
};

}  // namespace

TEST_CASE("a rank that hangs in a step holds a stop up for the time to drain alone") {
  Group group({"--drain_timeout_s=1", "--step_timeout_ms=600000"});
  group.RunRequest(200);
  group.workers[1]->fault = Fault::kHang;
  group.coordinator->Signal(SIGTERM);
  CHECK(group.coordinator->WaitEnded(kStopMs));  // the step's time-out is ten minutes
  group.client.join();
  INFO(group.Log());
  CHECK(group.coordinator->exit_status() == 0);
  CHECK(group.status.error_code() == grpc::StatusCode::UNAVAILABLE);
  CHECK(group.status.error_message() == "the server is shutting down");
  for (const auto& worker : group.workers) CHECK(worker->drained);
}

TEST_CASE("a stop does not wait for requests whose ranks are gone") {
  Group group({"--drain_timeout_s=600", "--step_timeout_ms=600000"});
  group.RunRequest(200);
  group.workers[1]->fault = Fault::kHang;
  SECTION("before the stop") {
    group.workers[1]->Stop();
    REQUIRE(Becomes([&] { return group.Info().held() == 1; }));
    group.coordinator->Signal(SIGTERM);
  }
  SECTION("behind the stop") {
    group.coordinator->Signal(SIGTERM);
    REQUIRE(Becomes([&] { return group.Logged("] draining\n"); }));
    group.workers[1]->Stop();
  }
  CHECK(group.coordinator->WaitEnded(kStopMs));
  group.client.join();
  INFO(group.Log());
  CHECK(group.coordinator->exit_status() == 0);
  CHECK(group.status.error_code() == grpc::StatusCode::UNAVAILABLE);
  CHECK(group.status.error_message() == "the model group was lost");
  CHECK(group.Logged("running requests are ended, ranks are gone: "));
  CHECK(group.workers[0]->drained);
}

TEST_CASE("a stop waits for requests whose ranks load again") {
  Group group({"--drain_timeout_s=600"});
  group.RunRequest(200);
  group.workers[1]->fault = Fault::kHang;
  group.workers[1]->Stop();
  group.workers[1]->fault = Fault::kNone;
  group.SetReady(1, false);
  group.workers[1]->Restart();
  REQUIRE(Becomes([&] { return group.Info().reason().find("MiB loaded") != std::string::npos; }));
  group.coordinator->Signal(SIGTERM);
  REQUIRE(Becomes([&] { return group.Logged("] draining\n"); }));
  CHECK_FALSE(group.coordinator->WaitEnded(1000));
  group.SetReady(1, true);
  group.client.join();
  INFO(group.Log());
  CHECK(group.status.ok());
  CHECK(group.generated == 200);
  CHECK(group.coordinator->WaitEnded(kStopMs));
  CHECK(group.coordinator->exit_status() == 0);
}

TEST_CASE("flags that would do nothing are refused by name") {
  const auto refused = [](const std::vector<std::string>& flags, const std::string& text) {
    Group group(flags);
    INFO(text);
    CHECK(group.coordinator->WaitEnded(kStartMs));
    INFO(group.Log());
    CHECK(group.coordinator->exit_status() == 1);
    CHECK(group.Logged(text));
  };
  refused({"--record_trees_count=4"}, "--record_trees_count does nothing without --record_trees\n");
  // The ranks tell what they have loaded.
  refused({"--budget=7"}, "--budget does nothing: the workers have loaded no drafter\n");
  refused({"--tree=chain"}, "--tree does nothing: the workers have loaded no drafter\n");
  refused({"--record_trees=/dev/null"}, "--record_trees does nothing: the workers have loaded no drafter\n");
}

}  // namespace kdt::testing
