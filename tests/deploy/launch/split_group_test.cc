// Workers and coordinator started apart, as the two containers of a pod are: kdt-launch --role=workers and
// kdt-coordinator share nothing but a folder of sockets.
#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>

#include "common/process.h"
#include "kdt/v1/generation.grpc.pb.h"
#include "tests/support/catch.h"
#include "tests/support/cluster.h"
#include "tests/support/requests.h"

namespace kdt::testing {
namespace {

constexpr int kTp = 4;
constexpr int kStartMs = 60000;
constexpr int kStopMs = 30000;

struct Pod {
  Pod() {
    auto made = MakeTempDir("kdt-test-");
    REQUIRE(made.ok());
    dir = *made;
  }
  ~Pod() {
    coordinator.reset();
    if (workers.has_value() && !workers->Ended()) {
      workers->Signal(SIGKILL);
      workers->WaitEnded(kStopMs);
    }
    RemoveTree(dir);
  }

  ChildProcess Start(const std::string& program, std::vector<std::string> flags) {
    ChildProcess::Options process;
    process.name = program;
    process.argv = {std::string(KDT_BIN_DIR) + "/" + program, "--model=" + GoldenModel()};
    process.argv.insert(process.argv.end(), flags.begin(), flags.end());
    process.capture_stdout = true;
    process.stderr_path = dir + "/log";
    auto started = ChildProcess::Start(process);
    REQUIRE(started.ok());
    return *std::move(started);
  }
  // A port that is free now; nothing else on this host takes it between here and its use but by bad luck.
  static int FreePort() {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    REQUIRE(bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0);
    REQUIRE(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0);
    close(fd);
    return ntohs(address.sin_port);
  }
  void StartWorkers(int drain_timeout_s = 30) {
    workers.emplace(Start(
        "kdt-launch", {"--role=workers", "--tp=4", "--threads=1", "--socket_dir=" + dir, "--on_loss=restart",
                       "--drain_timeout_s=" + std::to_string(drain_timeout_s), "--", "--max_tree_nodes=64"}));
    REQUIRE(workers->WaitForLine("kdt workers started", kStartMs).ok());
  }
  void StartCoordinator() {
    std::string addresses;
    for (int rank = 0; rank < kTp; ++rank) {
      addresses += (rank == 0 ? "unix:" : ",unix:") + dir + "/rank" + std::to_string(rank) + ".sock";
    }
    StartCoordinator(addresses);
  }
  void StartCoordinator(const std::string& addresses) {
    coordinator.emplace(Start("kdt-coordinator",
                              {"--workers=" + addresses, "--listen=127.0.0.1:0", "--on_group_loss=rejoin"}));
    const std::string prefix = "kdt-coordinator ready listen=";
    const auto line = coordinator->WaitForLine(prefix, kStartMs);
    INFO(Log());
    REQUIRE(line.ok());
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    stub = v1::Generation::NewStub(grpc::CreateCustomChannel(line->substr(prefix.size()),
                                                             grpc::InsecureChannelCredentials(), arguments));
  }
  std::string Log() const {
    std::ifstream file(dir + "/log");
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }
  pid_t AnyWorker() const {
    std::ifstream file("/proc/" + std::to_string(workers->pid()) + "/task/" + std::to_string(workers->pid()) +
                       "/children");
    pid_t pid = -1;
    file >> pid;
    return pid;
  }

  std::string dir;
  std::optional<ChildProcess> workers;
  std::optional<ChildProcess> coordinator;
  std::unique_ptr<v1::Generation::Stub> stub;
};

v1::GenerateRequest Request(uint32_t tokens) { return GreedyRequest(kShortPrompt, tokens); }

// A request read in the background; `started` once its first answer came.
struct Running {
  Running(v1::Generation::Stub& stub, uint32_t tokens) {
    thread = std::thread([this, &stub, tokens] {
      grpc::ClientContext context;
      auto reader = stub.Generate(&context, Request(tokens));
      v1::GenerateResponse response;
      while (reader->Read(&response)) {
        for (const uint32_t id : response.chunk().token_ids()) generated.push_back(id);
        started = true;
      }
      status = reader->Finish();
    });
    for (int i = 0; i < 4000 && !started; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    REQUIRE(started);
  }
  ~Running() {
    if (thread.joinable()) thread.join();
  }
  std::atomic<bool> started{false};
  std::vector<uint32_t> generated;
  grpc::Status status;
  std::thread thread;
};

}  // namespace

TEST_CASE("a dead rank restarts all ranks together, and the stream goes on without a repeated token") {
  Pod pod;
  pod.StartWorkers();
  pod.StartCoordinator();
  std::vector<Sample> undisturbed;
  REQUIRE(Generate(*pod.stub, Request(400), &undisturbed).ok());

  Running running(*pod.stub, 400);
  const pid_t victim = pod.AnyWorker();
  REQUIRE(victim > 0);
  REQUIRE(kill(victim, SIGKILL) == 0);
  running.thread.join();
  INFO(pod.Log());
  CHECK(running.status.ok());
  CHECK(running.generated == undisturbed[0].tokens);
  CHECK(pod.Log().find("(pid " + std::to_string(victim) + ") was killed by signal 9") != std::string::npos);
  CHECK(pod.Log().find("restarting all 4 workers in 1 s") != std::string::npos);
}

TEST_CASE("the workers outlive their coordinator, and a new one joins them without a reload") {
  Pod pod;
  pod.StartWorkers();
  pod.StartCoordinator();
  const pid_t worker = pod.AnyWorker();
  pod.coordinator->Signal(SIGKILL);
  REQUIRE(pod.coordinator->WaitEnded(kStopMs));
  pod.StartCoordinator();
  std::vector<Sample> samples;
  CHECK(Generate(*pod.stub, Request(5), &samples).ok());
  CHECK(pod.AnyWorker() == worker);
}

TEST_CASE("SIGHUP ends a coordinator when its requests are done, and leaves the workers to the next one") {
  Pod pod;
  pod.StartWorkers();
  pod.StartCoordinator();
  const pid_t worker = pod.AnyWorker();
  Running running(*pod.stub, 300);
  pod.coordinator->Signal(SIGHUP);
  running.thread.join();
  CHECK(running.status.ok());
  CHECK(running.generated.size() == 300);
  REQUIRE(pod.coordinator->WaitEnded(kStopMs));
  CHECK(pod.coordinator->exit_status() == 0);
  pod.StartCoordinator();
  std::vector<Sample> samples;
  CHECK(Generate(*pod.stub, Request(5), &samples).ok());
  CHECK(pod.AnyWorker() == worker);
  CHECK(pod.Log().find("restarting") == std::string::npos);
}

TEST_CASE("SIGTERM behind SIGHUP ends the workers too") {
  Pod pod;
  pod.StartWorkers();
  pod.StartCoordinator();
  Running running(*pod.stub, 1000);
  pod.coordinator->Signal(SIGHUP);
  for (int i = 0; i < 4000 && pod.Log().find("] draining\n") == std::string::npos; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  pod.workers->Signal(SIGTERM);
  pod.coordinator->Signal(SIGTERM);
  CHECK(pod.coordinator->WaitEnded(kStopMs));
  CHECK(pod.workers->WaitEnded(kStopMs));
  running.thread.join();
  INFO(pod.Log());
  CHECK(running.status.ok());
  CHECK(pod.Log().find("not ended by the coordinator") == std::string::npos);
}

TEST_CASE("stopped at the same moment, the workers wait until the coordinator's requests are done") {
  Pod pod;
  pod.StartWorkers();
  pod.StartCoordinator();
  Running running(*pod.stub, 300);
  pod.workers->Signal(SIGTERM);
  pod.coordinator->Signal(SIGTERM);
  running.thread.join();
  INFO(pod.Log());
  CHECK(running.status.ok());
  CHECK(running.generated.size() == 300);
  CHECK(pod.coordinator->WaitEnded(kStopMs));
  CHECK(pod.coordinator->exit_status() == 0);
  CHECK(pod.workers->WaitEnded(kStopMs));
  CHECK(pod.workers->exit_status() == 0);
}

TEST_CASE("workers that no coordinator uses end at once on a stop") {
  Pod pod;
  pod.StartWorkers(/*drain_timeout_s=*/600);
  SECTION("none came") {
    for (int rank = 0; rank < kTp; ++rank) {
      const std::string socket = pod.dir + "/rank" + std::to_string(rank) + ".sock";
      for (int i = 0; i < 4000 && !std::filesystem::exists(socket); ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  SECTION("it is gone") {
    pod.StartCoordinator();
    pod.coordinator->Signal(SIGKILL);
    REQUIRE(pod.coordinator->WaitEnded(kStopMs));
  }
  pod.workers->Signal(SIGTERM);
  CHECK(pod.workers->WaitEnded(kStopMs));
  CHECK(pod.workers->exit_status() == 0);
  INFO(pod.Log());
  CHECK(pod.Log().find("no coordinator uses this rank: it ends") != std::string::npos);
  CHECK(pod.Log().find("not ended by the coordinator") == std::string::npos);
}

TEST_CASE("a worker that hangs does not hold up a stop when the others have ended") {
  Pod pod;
  pod.StartWorkers();
  pod.StartCoordinator();
  REQUIRE(kill(pod.AnyWorker(), SIGSTOP) == 0);
  pod.workers->Signal(SIGTERM);
  pod.coordinator->Signal(SIGTERM);
  CHECK(pod.workers->WaitEnded(kStopMs));  // their time to drain is longer
  CHECK(pod.workers->exit_status() == 0);
  INFO(pod.Log());
  CHECK(pod.Log().find("not ended by the coordinator in time: worker 0\n") != std::string::npos);
}

TEST_CASE("a stop does not wait for a restart's backoff") {
  Pod pod;
  ChildProcess::Options process;
  process.name = "kdt-launch";
  const std::string bin = KDT_BIN_DIR;
  // No checkpoint there: each start fails and is repeated with a growing backoff until the launcher gives up.
  process.argv = {bin + "/kdt-launch",       "--model=" + pod.dir, "--role=workers",    "--tp=1",
                  "--socket_dir=" + pod.dir, "--on_loss=restart",  "--max_restarts=100"};
  process.stderr_path = pod.dir + "/log";
  auto launcher = ChildProcess::Start(process);
  REQUIRE(launcher.ok());
  for (int i = 0; i < 4000 && pod.Log().find("workers in 4 s") == std::string::npos; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  CHECK(pod.Log().find("workers in 4 s") != std::string::npos);
  const std::string log = pod.Log();
  const size_t loss = log.find("the first loss was: worker 0");
  REQUIRE(loss != std::string::npos);
  // With the reason that the worker told.
  CHECK(log.substr(loss, log.find('\n', loss) - loss).find(" exited with status 1: cannot load: ") !=
        std::string::npos);
  launcher->Signal(SIGTERM);
  CHECK(launcher->WaitEnded(kStopMs));
  CHECK(launcher->exit_status() == 0);
  CHECK(pod.Log().find("workers in 8 s") == std::string::npos);
}

TEST_CASE("a coordinator started apart tells why the workers that it waits for have ended") {
  Pod pod;
  pod.workers.emplace(pod.Start("kdt-launch", {"--role=workers", "--model=" + pod.dir, "--tp=1",
                                               "--socket_dir=" + pod.dir, "--on_loss=restart"}));
  pod.coordinator.emplace(pod.Start("kdt-coordinator", {"--workers=unix:" + pod.dir + "/rank0.sock",
                                                        "--listen=127.0.0.1:0", "--on_group_loss=rejoin"}));
  const std::string waiting = "0 of 1 ranks are ready; waiting for rank 0 (no answer; worker 0 (pid ";
  for (int i = 0; i < 4000 && pod.Log().find(waiting) == std::string::npos; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const std::string log = pod.Log();
  INFO(log);
  const size_t line = log.find(waiting);
  REQUIRE(line != std::string::npos);
  CHECK(log.substr(line, log.find('\n', line) - line).find(") exited with status 1: cannot load: ") !=
        std::string::npos);
  pod.workers->Signal(SIGTERM);
  CHECK(pod.workers->WaitEnded(kStopMs));
  CHECK_FALSE(std::filesystem::exists(pod.dir + "/rank0.sock.lost"));
}

TEST_CASE("a group whose ranks are spread over launchers, on TCP") {
  Pod pod;
  const std::string hosts[2] = {"127.0.0.1:" + std::to_string(Pod::FreePort()),
                                "127.0.0.1:" + std::to_string(Pod::FreePort())};
  std::vector<ChildProcess> nodes;
  for (int node = 0; node < 2; ++node) {
    nodes.push_back(
        pod.Start("kdt-launch", {"--role=workers", "--tp=2", "--threads=1", "--ranks_per_node=1",
                                 "--node_index=" + std::to_string(node), "--worker_listen=" + hosts[node]}));
  }
  pod.StartCoordinator(hosts[0] + "," + hosts[1]);
  std::vector<Sample> samples;
  CHECK(Generate(*pod.stub, Request(5), &samples).ok());
  CHECK(samples[0].tokens.size() == 5);
  pod.coordinator->Signal(SIGTERM);
  for (ChildProcess& node : nodes) node.Signal(SIGTERM);
  for (ChildProcess& node : nodes) {
    CHECK(node.WaitEnded(kStopMs));
    CHECK(node.exit_status() == 0);
  }
}

}  // namespace kdt::testing
