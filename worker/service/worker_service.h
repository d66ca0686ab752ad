// kdt.v1.Worker over the callback API.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <string>

#include "common/clock.h"
#include "kdt/v1/worker.grpc.pb.h"
#include "worker/service/engine_thread.h"

namespace kdt {

struct WorkerIdentity {
  int rank = 0;
  int tp = 1;
  std::string backend;
  std::string device;
  // As in kernels/backend.h, DeviceFacts.
  std::string arch = {};
  std::string gpu_uuid = {};
  std::string pci_bus_id = {};
};

class WorkerService : public v1::Worker::CallbackService {
 public:
  // `on_drained` is called with the reason given once a Drain call has been answered; the process is to end
  // then.
  WorkerService(WorkerIdentity identity, EngineThread* engine,
                std::function<void(const std::string& reason)> on_drained)
      : identity_(std::move(identity)), engine_(engine), on_drained_(std::move(on_drained)) {}

  void SetProgress(uint64_t loaded, uint64_t total) {
    loaded_bytes_ = loaded;
    total_bytes_ = total;
  }
  void SetLoadError(const std::string& error);
  // Whether a coordinator has a call open, or has called just now: one that forms the group calls all the
  // time. From any thread.
  bool used() const;

  grpc::ServerUnaryReactor* Describe(grpc::CallbackServerContext* context, const v1::DescribeRequest* request,
                                     v1::DescribeResponse* response) override;
  grpc::ServerUnaryReactor* JoinGroup(grpc::CallbackServerContext* context,
                                      const v1::JoinGroupRequest* request,
                                      v1::JoinGroupResponse* response) override;
  grpc::ServerBidiReactor<v1::StepRequest, v1::StepResponse>* Steps(
      grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context, const v1::DrainRequest* request,
                                  v1::DrainResponse* response) override;

 private:
  void EndCall();

  const WorkerIdentity identity_;
  EngineThread* const engine_;
  const std::function<void(const std::string&)> on_drained_;
  std::atomic<uint64_t> loaded_bytes_{0};
  std::atomic<uint64_t> total_bytes_{0};
  std::atomic<int> open_calls_{0};
  std::atomic<int64_t> called_us_{MonotonicMicros()};  // one may be about to find this worker
  std::mutex mutex_;
  std::string load_error_;
};

// Server settings that both ends agree on: message limits, and keepalive that a long prefill does not trip.
void ConfigureWorkerServer(grpc::ServerBuilder* builder);

}  // namespace kdt
