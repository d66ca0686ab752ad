#include "tests/support/served_group.h"

#include <signal.h>

#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace kdt::testing {
namespace {

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

absl::StatusOr<std::unique_ptr<ServedGroup>> ServedGroup::Start(const ServedGroupOptions& options) {
  std::unique_ptr<ServedGroup> group(new ServedGroup);
  KDT_ASSIGN_OR_RETURN(group->dir_, MakeTempDir("kdt-test-"));
  ChildProcess::Options process;
  process.name = "kdt-launch";
  process.argv = {absl::StrCat(options.bin_dir, "/kdt-launch"), absl::StrCat("--model=", options.model),
                  absl::StrCat("--tp=", options.tp), "--listen=127.0.0.1:0",
                  absl::StrCat("--threads=", options.threads)};
  if (!options.drafter.empty()) process.argv.push_back(absl::StrCat("--drafter=", options.drafter));
  process.argv.insert(process.argv.end(), options.flags.begin(), options.flags.end());
  process.capture_stdout = true;
  process.stderr_path = group->dir_ + "/log";
  KDT_ASSIGN_OR_RETURN(ChildProcess launcher, ChildProcess::Start(process));
  group->launcher_.emplace(std::move(launcher));

  const std::string prefix = "kdt ready listen=";
  const auto line = group->launcher_->WaitForLine(prefix, options.start_timeout_ms);
  if (!line.ok()) {
    return absl::Status(
        line.status().code(),
        absl::StrCat("the group did not start: ", line.status().message(), "\n", group->Log()));
  }
  group->server_ = line->substr(prefix.size());
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  group->channel_ = grpc::CreateCustomChannel(group->server_, grpc::InsecureChannelCredentials(), arguments);
  group->stub_ = v1::Generation::NewStub(group->channel_);
  return group;
}

ServedGroup::~ServedGroup() {
  if (launcher_.has_value() && !launcher_->Ended()) {
    launcher_->Signal(SIGTERM);
    launcher_->WaitEnded(kStopTimeoutMs);
  }
  launcher_.reset();
  if (!dir_.empty()) RemoveTree(dir_);
}

std::string ServedGroup::Log() const {
  std::ifstream file(dir_ + "/log");
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<pid_t> ServedGroup::WorkerPids() const {
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

pid_t ServedGroup::CoordinatorPid() const {
  for (const pid_t pid : Children(launcher_->pid())) {
    if (CommandLine(pid).find("/kdt-coordinator ") != std::string::npos) return pid;
  }
  return -1;
}

}  // namespace kdt::testing
