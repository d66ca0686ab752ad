#include "tests/coordinator/group/fake_worker.h"

#include <chrono>
#include <thread>

#include "common/status.h"

namespace kdt::testing {

FakeWorker::FakeWorker(const std::string& address, uint32_t rank, uint32_t tp, ToyOptions toy)
    : address_(address), rank_(rank), toy_(toy) {
  description.set_rank(rank);
  description.set_tp(tp);
  description.set_backend("cpu");
  description.set_device("toy");
  description.set_checkpoint_digest("toy");
  description.set_ready(true);
  description.set_kv_slots_total(toy.slots);
  description.set_max_rows(toy.max_rows);
  description.set_max_tree_nodes(toy.max_tree_nodes);
  description.set_max_sequences(toy.max_sequences);
  description.set_draft_block_size(toy.block_size);
  description.set_max_draft_top_k(toy.max_draft_top_k);
  description.set_max_context(toy.max_context);
  description.set_kv_dtype("f32");
  Restart();
}

FakeWorker::~FakeWorker() { Stop(); }

void FakeWorker::Stop() {
  if (server_ == nullptr) return;
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
  server_.reset();
}

void FakeWorker::Restart() {
  grpc::ServerBuilder builder;
  builder.AddListeningPort(address_, grpc::InsecureServerCredentials());
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
  KDT_CHECK(server_ != nullptr);
}

grpc::Status FakeWorker::Describe(grpc::ServerContext* context, const v1::DescribeRequest*,
                                  v1::DescribeResponse* response) {
  before_answer(*context);
  while (fault == Fault::kSilent && !context->IsCancelled()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const std::lock_guard lock(description_mutex);
  *response = description;
  return grpc::Status::OK;
}

grpc::Status FakeWorker::JoinGroup(grpc::ServerContext* context, const v1::JoinGroupRequest* request,
                                   v1::JoinGroupResponse*) {
  if (request->rank() != rank_ || request->epoch() <= epoch) {
    return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "epoch or rank");
  }
  ++joins;
  if (fault == Fault::kStopsAtJoin) fault = Fault::kSilent;
  if (fault == Fault::kJoinFails)
    return grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "no room to join");
  if (fault == Fault::kJoinHangs || fault == Fault::kSilent) {
    while (!context->IsCancelled()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return grpc::Status::CANCELLED;
  }
  epoch = request->epoch();
  toy_.StartEpoch();
  return grpc::Status::OK;
}

grpc::Status FakeWorker::Steps(grpc::ServerContext* context,
                               grpc::ServerReaderWriter<v1::StepResponse, v1::StepRequest>* stream) {
  v1::StepRequest request;
  while (stream->Read(&request)) {
    v1::StepResponse response;
    absl::Status status = toy_.Step(request, &response);
    switch (fault) {
      case Fault::kNone:
      case Fault::kJoinFails:
      case Fault::kJoinHangs:
      case Fault::kStopsAtJoin:
      case Fault::kSilent:
        break;
      case Fault::kHang:
        while (!context->IsCancelled()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        return grpc::Status::OK;
      case Fault::kWaits:
        std::this_thread::sleep_for(std::chrono::milliseconds(request.deadline_ms()));
        status = absl::DeadlineExceededError("a peer did not come");
        break;
      case Fault::kFails:
        status = absl::InternalError("the device is broken");
        break;
      case Fault::kDigest:
        response.set_digest(response.digest() + 1);
        break;
      case Fault::kEndsStream:
        return grpc::Status(grpc::StatusCode::UNAVAILABLE, "killed");
    }
    response.set_rank(rank_);
    response.set_epoch(request.epoch());
    response.set_step(request.step());
    if (rank_ != 0) response.clear_results();
    if (!status.ok()) {
      response.set_error_code(static_cast<uint32_t>(status.code()));
      response.set_error(std::string(status.message()));
    }
    stream->Write(response);
  }
  return grpc::Status::OK;
}

grpc::Status FakeWorker::Drain(grpc::ServerContext* context, const v1::DrainRequest* request,
                               v1::DrainResponse*) {
  before_answer(*context);
  if (context->IsCancelled()) return grpc::Status::CANCELLED;
  drain_reason = request->reason();
  drained = true;
  return grpc::Status::OK;
}

}  // namespace kdt::testing
