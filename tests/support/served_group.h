// A group of real processes behind kdt-launch, ended with the object. No test framework in it: the programs
// of tests/gpu use it as well as the integration tests (cluster.h).
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/process.h"
#include "kdt/v1/generation.grpc.pb.h"

namespace kdt::testing {

struct ServedGroupOptions {
  std::string bin_dir;  // where kdt-launch lies
  std::string model;
  std::string drafter;  // empty: none
  int tp = 1;
  int threads = 1;                 // a worker
  std::vector<std::string> flags;  // more flags of kdt-launch
  int start_timeout_ms = 60000;
};

class ServedGroup {
 public:
  // Starts the group and waits until it serves. An error holds the log.
  static absl::StatusOr<std::unique_ptr<ServedGroup>> Start(const ServedGroupOptions& options);
  ~ServedGroup();
  ServedGroup(const ServedGroup&) = delete;
  ServedGroup& operator=(const ServedGroup&) = delete;

  v1::Generation::Stub& stub() { return *stub_; }
  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  const std::string& server() const { return server_; }  // HOST:PORT
  ChildProcess& launcher() { return *launcher_; }
  std::string Log() const;  // standard error of all processes so far

  // Process ids of the launcher's children whose command is kdt-worker (by rank) or kdt-coordinator.
  std::vector<pid_t> WorkerPids() const;
  pid_t CoordinatorPid() const;

 private:
  ServedGroup() = default;

  std::string dir_;
  std::optional<ChildProcess> launcher_;
  std::string server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Generation::Stub> stub_;
};

}  // namespace kdt::testing
