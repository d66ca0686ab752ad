// Processes that die: everything ends soon, the reason names the process, clients learn it, nothing is left
// behind.
#include <signal.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

#include "common/process.h"
#include "tests/support/catch.h"
#include "tests/support/cluster.h"
#include "tests/support/requests.h"

namespace kdt::testing {
namespace {

constexpr int kEndWithinMs = 5000;

v1::GenerateRequest Endless() { return RequestFor(kShortPrompt, 20000); }

bool Alive(pid_t pid) { return kill(pid, 0) == 0; }

// Temporary files of the processes that are started meanwhile. A killed launcher cannot remove its own.
class OwnTemporaryFolder {
 public:
  OwnTemporaryFolder() {
    const auto made = MakeTempDir("kdt-test-");
    REQUIRE(made.ok());
    path_ = *made;
    if (const char* before = std::getenv("TMPDIR"); before != nullptr) before_ = before;
    setenv("TMPDIR", path_.c_str(), 1);
  }
  ~OwnTemporaryFolder() {
    if (before_.empty()) {
      unsetenv("TMPDIR");
    } else {
      setenv("TMPDIR", before_.c_str(), 1);
    }
    RemoveTree(path_);
  }

  const std::string& path() const { return path_; }

 private:
  std::string path_, before_;
};

// Waits for the first chunk of a stream that the thread keeps reading until it ends.
struct RunningRequest {
  explicit RunningRequest(Cluster& cluster) {
    thread = std::thread([this, &cluster] {
      auto reader = cluster.stub().Generate(&context, Endless());
      v1::GenerateResponse response;
      while (reader->Read(&response)) started = true;
      status = reader->Finish();
    });
    for (int i = 0; i < 2000 && !started; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    REQUIRE(started);
  }
  grpc::ClientContext context;
  std::atomic<bool> started{false};
  grpc::Status status;
  std::thread thread;
};

}  // namespace

TEST_CASE("a killed process ends the group, named, and clients get UNAVAILABLE") {
  for (const std::string victim : {"worker 0", "worker 2", "coordinator", "launcher"}) {
    DYNAMIC_SECTION(victim) {
      const OwnTemporaryFolder temporary;
      Cluster cluster({GoldenModel(), "", 4, {}});
      const std::vector<pid_t> workers = cluster.WorkerPids();
      const pid_t coordinator = cluster.CoordinatorPid();
      REQUIRE(workers.size() == 4);
      REQUIRE(coordinator > 0);
      RunningRequest running(cluster);

      const pid_t victim_pid = victim == "worker 0"   ? workers[0]
                               : victim == "worker 2" ? workers[2]
                               : victim == "launcher" ? cluster.launcher().pid()
                                                      : coordinator;
      REQUIRE(kill(victim_pid, SIGKILL) == 0);
      CHECK(cluster.launcher().WaitEnded(kEndWithinMs));
      running.thread.join();
      CHECK(running.status.error_code() == grpc::StatusCode::UNAVAILABLE);
      if (victim.rfind("worker", 0) == 0) CHECK(running.status.error_message() == "the model group was lost");
      if (victim != "launcher") {
        INFO(cluster.Log());
        CHECK(cluster.launcher().exit_status() == 1);
        CHECK(cluster.Log().find(victim + " (pid " + std::to_string(victim_pid) +
                                 ") was killed by signal 9") != std::string::npos);
      }
      for (int i = 0; i < kEndWithinMs / 10 && (Alive(coordinator) || Alive(workers[1])); ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      CHECK_FALSE(Alive(coordinator));
      for (const pid_t pid : workers) CHECK_FALSE(Alive(pid));
      CHECK(SharedMemoryNames().empty());
    }
  }
}

TEST_CASE("what a killed launcher leaves in the temporary folder is removed by the next one") {
  const OwnTemporaryFolder temporary;
  const auto folders = [&] {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(temporary.path())) {
      const std::string name = entry.path().filename().string();
      if (name.rfind("kdt-group-", 0) == 0) names.push_back(name);
    }
    return names;
  };
  Cluster live({GoldenModel(), "", 1, {}});
  const std::vector<std::string> of_live = folders();
  REQUIRE(of_live.size() == 1);
  {
    Cluster killed({GoldenModel(), "", 1, {}});
    REQUIRE(kill(killed.launcher().pid(), SIGKILL) == 0);
    REQUIRE(killed.launcher().WaitEnded(kEndWithinMs));
  }
  REQUIRE(folders().size() == 2);
  {
    Cluster next({GoldenModel(), "", 1, {}});
    CHECK(folders().size() == 2);
    std::vector<Sample> samples;
    CHECK(Generate(live.stub(), RequestFor(kShortPrompt, 3), &samples).ok());
  }
  CHECK(folders() == of_live);
}

TEST_CASE("a checkpoint that cannot be loaded ends the group, with the reason in the launcher's line") {
  const std::string model = *MakeTempDir("kdt-test-");
  std::filesystem::copy(GoldenModel(), model);
  std::filesystem::resize_file(model + "/model-00002-of-00002.safetensors", 1000);
  ChildProcess::Options options;
  options.name = "kdt-launch";
  options.argv = {std::string(KDT_BIN_DIR) + "/kdt-launch", "--model=" + model, "--tp=2", "--threads=1",
                  "--listen=127.0.0.1:0"};
  options.stderr_path = model + "/log";
  auto launcher = ChildProcess::Start(options);
  REQUIRE(launcher.ok());
  CHECK(launcher->WaitEnded(kEndWithinMs));
  CHECK(launcher->exit_status() == 1);
  std::ostringstream log;
  log << std::ifstream(options.stderr_path).rdbuf();
  INFO(log.str());
  // The coordinator hears of it first, and ends before the worker does.
  const std::string text = log.str();
  const size_t line = text.find("; ending the group");
  REQUIRE(line != std::string::npos);
  const size_t begin = text.rfind('\n', line);
  CHECK(text.substr(begin, line - begin).find(": cannot load: ") != std::string::npos);
  CHECK(text.substr(begin, line - begin).find("the file is truncated") != std::string::npos);
  RemoveTree(model);
}

TEST_CASE("when the launcher gives up, a request that waited for the group is ended with a status") {
  Cluster cluster({GoldenModel(), "", 2, {"--on_loss=restart", "--max_restarts=1"}});
  RunningRequest running(cluster);
  REQUIRE(kill(cluster.WorkerPids().at(1), SIGKILL) == 0);
  // The second loss lies within ten minutes of the first.
  for (int i = 0; i < 2000 && cluster.Log().find("restarting all 2 workers") == std::string::npos; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  std::vector<pid_t> again;
  for (int i = 0; i < 2000 && again.size() < 2; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    again = cluster.WorkerPids();
  }
  REQUIRE(again.size() == 2);
  REQUIRE(kill(again[0], SIGKILL) == 0);
  CHECK(cluster.launcher().WaitEnded(kEndWithinMs));
  running.thread.join();
  INFO(cluster.Log());
  CHECK(cluster.launcher().exit_status() == 1);
  CHECK(running.status.error_code() == grpc::StatusCode::UNAVAILABLE);
  CHECK(running.status.error_message() == "the model group was lost");
}

TEST_CASE("a stop while the workers are gone does not wait for requests that wait for them") {
  Cluster cluster({GoldenModel(), "", 2, {"--on_loss=restart", "--drain_timeout_s=600"}});
  RunningRequest running(cluster);
  SECTION("they are to be started again") {
    REQUIRE(kill(cluster.WorkerPids().at(1), SIGKILL) == 0);
    for (int i = 0; i < 2000 && cluster.Log().find("restarting all 2 workers") == std::string::npos; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    cluster.launcher().Signal(SIGTERM);
  }
  SECTION("one dies behind the stop") {
    cluster.launcher().Signal(SIGTERM);
    for (int i = 0; i < 2000 && cluster.Log().find("] draining\n") == std::string::npos; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    REQUIRE(kill(cluster.WorkerPids().at(1), SIGKILL) == 0);
  }
  CHECK(cluster.launcher().WaitEnded(30000));
  running.thread.join();
  INFO(cluster.Log());
  CHECK(cluster.launcher().exit_status() == 0);
  CHECK(running.status.error_code() == grpc::StatusCode::UNAVAILABLE);
  CHECK(running.status.error_message() == "the model group was lost");
}

TEST_CASE("SIGTERM lets a running request finish and exits 0") {
  Cluster cluster({GoldenModel(), "", 2, {}});
  v1::GenerateRequest request = Endless();
  request.mutable_stop()->set_max_tokens(300);
  std::vector<Sample> samples;
  grpc::Status status;
  std::thread client([&] { status = Generate(cluster.stub(), request, &samples); });
  v1::ClusterInfo info;
  for (int i = 0; i < 1000 && info.running() == 0; ++i) {
    grpc::ClientContext context;
    REQUIRE(cluster.stub().GetClusterInfo(&context, {}, &info).ok());
  }
  cluster.launcher().Signal(SIGTERM);
  client.join();
  CHECK(status.ok());
  CHECK(samples[0].tokens.size() == 300);
  CHECK(cluster.launcher().WaitEnded(40000));
  CHECK(cluster.launcher().exit_status() == 0);
  CHECK(SharedMemoryNames().empty());
}

TEST_CASE("cancelling a call frees its slots and the running gauge") {
  Cluster cluster({GoldenModel(), "", 2, {}});
  RunningRequest running(cluster);
  running.context.TryCancel();
  running.thread.join();
  CHECK(running.status.error_code() == grpc::StatusCode::CANCELLED);
  v1::ClusterInfo info;
  for (int i = 0; i < 500; ++i) {
    grpc::ClientContext context;
    REQUIRE(cluster.stub().GetClusterInfo(&context, {}, &info).ok());
    if (info.running() == 0) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  CHECK(info.running() == 0);
}

}  // namespace kdt::testing
