// A worker in this process: the real service over a unix socket in front of an engine that does what a test
// says.
#pragma once

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "kdt/v1/worker.grpc.pb.h"
#include "tests/support/catch.h"
#include "worker/service/engine_thread.h"
#include "worker/service/worker_service.h"

namespace kdt {

// What an engine under test does in a step; the default reduces one value over the group, as any real step
// does.
using StepBehaviour = std::function<absl::Status(Collective&, const v1::StepRequest&, v1::StepResponse*)>;

inline absl::Status ReduceOnce(Collective& collective, const v1::StepRequest& request,
                               v1::StepResponse* response) {
  float value = 1;
  const absl::Status status =
      collective.AllReduceSum(kernels::MakeTensor(&value, kernels::DType::kF32, 1, 1));
  response->set_digest(request.step() * 1000 + static_cast<uint64_t>(value));
  return status;
}

class FakeEngine : public Engine {
 public:
  // `start`: what every StartEpoch comes to.
  explicit FakeEngine(StepBehaviour behaviour, absl::Status start = absl::OkStatus())
      : behaviour_(std::move(behaviour)), start_(std::move(start)) {}
  absl::Status StartEpoch(Collective* collective) override {
    collective_ = collective;
    return start_;
  }
  absl::Status Step(const v1::StepRequest& request, v1::StepResponse* response) override {
    return behaviour_(*collective_, request, response);
  }
  void Describe(v1::DescribeResponse* response) const override { response->set_max_rows(77); }

 private:
  StepBehaviour behaviour_;
  absl::Status start_;
  Collective* collective_ = nullptr;
};

class FakeWorker {
 public:
  FakeWorker(int rank, int tp, StepBehaviour behaviour = ReduceOnce, bool loaded = true)
      : folder_(std::filesystem::temp_directory_path() /
                ("kdt-service-test-" + std::to_string(getpid()) + "-" + std::to_string(++count_))) {
    std::filesystem::create_directory(folder_);
    engine_ = std::make_unique<EngineThread>(rank, tp, &FakeWorker::MakeCollective, nullptr);
    service_ = std::make_unique<WorkerService>(WorkerIdentity{rank, tp, "fake", "none"}, engine_.get(),
                                               [this](const std::string&) { drained = true; });
    if (loaded) engine_->SetEngine(std::make_unique<FakeEngine>(std::move(behaviour)));
    grpc::ServerBuilder builder;
    const std::string address = "unix:" + (folder_ / "s").string();
    builder.AddListeningPort(address, grpc::InsecureServerCredentials());
    ConfigureWorkerServer(&builder);
    builder.RegisterService(service_.get());
    server_ = builder.BuildAndStart();
    REQUIRE(server_ != nullptr);
    stub = v1::Worker::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  }
  ~FakeWorker() {
    server_->Shutdown(std::chrono::system_clock::now());
    std::filesystem::remove_all(folder_);
  }

  WorkerService& service() { return *service_; }
  EngineThread& engine() { return *engine_; }

  grpc::Status Join(uint64_t epoch, const std::string& id, uint32_t timeout_ms = 10000) {
    v1::DescribeResponse self;
    grpc::ClientContext describe;
    REQUIRE(stub->Describe(&describe, {}, &self).ok());
    v1::JoinGroupRequest request;
    request.set_epoch(epoch);
    request.set_rank(self.rank());
    request.set_tp(self.tp());
    request.set_collective_id(id);
    request.set_timeout_ms(timeout_ms);
    grpc::ClientContext context;
    v1::JoinGroupResponse response;
    return stub->JoinGroup(&context, request, &response);
  }

  uint64_t Epoch() {
    v1::DescribeResponse response;
    grpc::ClientContext context;
    REQUIRE(stub->Describe(&context, {}, &response).ok());
    return response.epoch();
  }

  std::unique_ptr<v1::Worker::Stub> stub;
  std::atomic<bool> drained{false};

 private:
  static absl::StatusOr<std::unique_ptr<Collective>> MakeCollective(const v1::JoinGroupRequest& request,
                                                                    const std::atomic<bool>* cancelled) {
    if (request.tp() == 1) return MakeLocalCollective();
    return MakeShmCollective(request.collective_id(), static_cast<int>(request.rank()),
                             static_cast<int>(request.tp()), 1 << 16,
                             absl::Milliseconds(request.timeout_ms()), cancelled);
  }

  static inline int count_ = 0;
  std::filesystem::path folder_;
  std::unique_ptr<EngineThread> engine_;
  std::unique_ptr<WorkerService> service_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace kdt
