// A worker process in this one: the Worker service on a unix socket, a toy rank behind it, faults on demand.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "kdt/v1/worker.grpc.pb.h"
#include "tests/coordinator/scheduler/toy_rank.h"

namespace kdt::testing {

enum class Fault {
  kNone,
  kHang,         // takes steps and never answers
  kWaits,        // answers that it waited in vain for another rank
  kFails,        // answers with an error of its own
  kDigest,       // computes something else than the others
  kJoinFails,    // has no room to join
  kJoinHangs,    // waits in JoinGroup for a peer that does not come
  kStopsAtJoin,  // is stopped when it is to join: from then on it says nothing
  kSilent,       // listens and tells nothing of itself
  kEndsStream,   // as if the process had died
};

class FakeWorker final : public v1::Worker::Service {
 public:
  FakeWorker(const std::string& address, uint32_t rank, uint32_t tp, ToyOptions toy = {});
  ~FakeWorker() override;

  void Stop();  // nobody listens any more
  void Restart();

  // May be changed at any time; what Describe tells.
  v1::DescribeResponse description;
  std::mutex description_mutex;
  std::atomic<Fault> fault{Fault::kNone};
  // What Describe and Drain do before they answer; set before the group forms.
  std::function<void(const grpc::ServerContext&)> before_answer = [](const grpc::ServerContext&) {};
  std::atomic<bool> drained{false};
  std::string drain_reason;  // once drained
  std::atomic<uint64_t> epoch{0};
  std::atomic<uint32_t> joins{0};  // calls

  grpc::Status Describe(grpc::ServerContext*, const v1::DescribeRequest*,
                        v1::DescribeResponse* response) override;
  grpc::Status JoinGroup(grpc::ServerContext*, const v1::JoinGroupRequest* request,
                         v1::JoinGroupResponse*) override;
  grpc::Status Steps(grpc::ServerContext* context,
                     grpc::ServerReaderWriter<v1::StepResponse, v1::StepRequest>* stream) override;
  grpc::Status Drain(grpc::ServerContext*, const v1::DrainRequest*, v1::DrainResponse*) override;

 private:
  const std::string address_;
  const uint32_t rank_;
  ToyRank toy_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace kdt::testing
