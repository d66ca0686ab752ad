// A real cluster for tests: kdt-launch with its coordinator and workers on free ports, ended with the object.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/process.h"
#include "kdt/v1/generation.grpc.pb.h"
#include "tests/support/served_group.h"

namespace kdt::testing {

struct ClusterOptions {
  std::string model;
  std::string drafter;  // empty: none
  int tp = 1;
  std::vector<std::string> flags;  // more flags of kdt-launch
};

class Cluster {
 public:
  // Starts the group and waits until it serves. Fails the running test with the log when it does not.
  explicit Cluster(const ClusterOptions& options);

  v1::Generation::Stub& stub() { return group_->stub(); }
  const std::shared_ptr<grpc::Channel>& channel() const { return group_->channel(); }
  const std::string& server() const { return group_->server(); }  // HOST:PORT
  ChildProcess& launcher() { return group_->launcher(); }
  std::string Log() const { return group_->Log(); }  // standard error of all processes so far

  // Process ids of the launcher's children whose command is kdt-worker (by rank) or kdt-coordinator.
  std::vector<pid_t> WorkerPids() const { return group_->WorkerPids(); }
  pid_t CoordinatorPid() const { return group_->CoordinatorPid(); }

 private:
  std::unique_ptr<ServedGroup> group_;
};

// One generated sample, collected from the stream.
struct Sample {
  std::vector<uint32_t> tokens;
  std::string text;
  std::string reasoning;
  std::vector<v1::PositionLogprobs> logprobs;
  std::optional<v1::Complete> complete;
};

// Runs the request to its end; samples by index.
grpc::Status Generate(v1::Generation::Stub& stub, const v1::GenerateRequest& request,
                      std::vector<Sample>* samples);

// Names under /dev/shm that belong to us.
std::vector<std::string> SharedMemoryNames();

std::string GoldenModel();    // folder of the golden target
std::string GoldenDrafter();  // folder of the golden drafter
std::string ShippedModel();   // deploy/models/kimi-tiny
std::string ShippedDrafter();

}  // namespace kdt::testing
