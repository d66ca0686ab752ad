#include "tests/support/cluster.h"

#include <signal.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "tests/support/catch.h"

namespace kdt::testing {
namespace {

constexpr int kStartTimeoutMs = 60000;
constexpr int kStopTimeoutMs = 40000;

std::string CommandLine(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/cmdline");
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  for (char& c : text) {
    if (c == '\0') c = ' ';
  }
  return text;
}

std::vector<pid_t> Children(pid_t parent) {
  std::ifstream file("/proc/" + std::to_string(parent) + "/task/" + std::to_string(parent) + "/children");
  std::vector<pid_t> pids;
  for (pid_t pid = 0; file >> pid;) pids.push_back(pid);
  return pids;
}

}  // namespace

Cluster::Cluster(const ClusterOptions& options) {
  auto dir = MakeTempDir("kdt-test-");
  REQUIRE(dir.ok());
  dir_ = *dir;
  ChildProcess::Options process;
  process.name = "kdt-launch";
  process.argv = {std::string(KDT_BIN_DIR) + "/kdt-launch", "--model=" + options.model,
                  "--tp=" + std::to_string(options.tp), "--listen=127.0.0.1:0", "--threads=1"};
  if (!options.drafter.empty()) process.argv.push_back("--drafter=" + options.drafter);
  process.argv.insert(process.argv.end(), options.flags.begin(), options.flags.end());
  process.capture_stdout = true;
  process.stderr_path = dir_ + "/log";
  auto launcher = ChildProcess::Start(process);
  REQUIRE(launcher.ok());
  launcher_.emplace(*std::move(launcher));

  const std::string prefix = "kdt ready listen=";
  const auto line = launcher_->WaitForLine(prefix, kStartTimeoutMs);
  if (!line.ok()) {
    FAIL("the cluster did not start: " << line.status().ToString() << "\n" << Log());
  }
  server_ = line->substr(prefix.size());
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  channel_ = grpc::CreateCustomChannel(server_, grpc::InsecureChannelCredentials(), arguments);
  stub_ = v1::Generation::NewStub(channel_);
}

Cluster::~Cluster() {
  if (launcher_.has_value() && !launcher_->Ended()) {
    launcher_->Signal(SIGTERM);
    launcher_->WaitEnded(kStopTimeoutMs);
  }
  launcher_.reset();
  if (!dir_.empty()) RemoveTree(dir_);
}

std::string Cluster::Log() const {
  std::ifstream file(dir_ + "/log");
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<pid_t> Cluster::WorkerPids() const {
  std::vector<pid_t> pids;
  for (int rank = 0;; ++rank) {
    bool found = false;
    for (const pid_t pid : Children(launcher_->pid())) {
      const std::string command = CommandLine(pid);
      if (command.find("/kdt-worker ") == std::string::npos) continue;
      if (command.find("--rank=" + std::to_string(rank) + " ") == std::string::npos) continue;
      pids.push_back(pid);
      found = true;
    }
    if (!found) return pids;
  }
}

pid_t Cluster::CoordinatorPid() const {
  for (const pid_t pid : Children(launcher_->pid())) {
    if (CommandLine(pid).find("/kdt-coordinator ") != std::string::npos) return pid;
  }
  return -1;
}

grpc::Status Generate(v1::Generation::Stub& stub, const v1::GenerateRequest& request,
                      std::vector<Sample>* samples) {
  samples->assign(request.sampling().has_n() ? request.sampling().n() : 1, Sample());
  grpc::ClientContext context;
  auto reader = stub.Generate(&context, request);
  v1::GenerateResponse response;
  while (reader->Read(&response)) {
    if (response.index() >= samples->size()) {
      samples->resize(response.index() + 1);
    }
    Sample& sample = (*samples)[response.index()];
    if (response.has_complete()) {
      CHECK_FALSE(sample.complete.has_value());  // exactly one
      sample.complete = response.complete();
      continue;
    }
    CHECK_FALSE(sample.complete.has_value());  // nothing behind it
    const v1::Chunk& chunk = response.chunk();
    sample.tokens.insert(sample.tokens.end(), chunk.token_ids().begin(), chunk.token_ids().end());
    sample.text += chunk.text();
    sample.reasoning += chunk.reasoning_text();
    sample.logprobs.insert(sample.logprobs.end(), chunk.logprobs().begin(), chunk.logprobs().end());
  }
  return reader->Finish();
}

std::vector<std::string> SharedMemoryNames() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename().string();
    if (name.rfind("kdt", 0) == 0) names.push_back(name);
  }
  return names;
}

std::string GoldenModel() { return std::string(KDT_GOLDENS_DIR) + "/model"; }
std::string GoldenDrafter() { return std::string(KDT_GOLDENS_DIR) + "/drafter"; }
std::string ShippedModel() { return std::string(KDT_SOURCE_DIR) + "/deploy/models/kimi-tiny"; }
std::string ShippedDrafter() { return ShippedModel() + "/drafter"; }

}  // namespace kdt::testing
