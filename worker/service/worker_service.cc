#include "worker/service/worker_service.h"

#include <unistd.h>

#include <utility>

#include "common/utf8.h"
#include "worker/service/step_stream.h"

namespace kdt {
namespace {

// A step carries at most max_rows token ids and a few thousand sampling fields; an answer, prompt
// log-probabilities of its rows. Both stay far below this, and a broken peer cannot make us hold more.
constexpr int kMaxMessageBytes = 64 << 20;
// How long behind a call a coordinator is taken to be there: it reconnects once a second.
constexpr int64_t kUsedUs = 2'000'000;

grpc::Status ToGrpc(const absl::Status& status) {
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()));
}

// A unary call that tells when its answer is out.
class DrainReactor : public grpc::ServerUnaryReactor {
 public:
  explicit DrainReactor(std::function<void()> on_done) : on_done_(std::move(on_done)) {}
  void OnDone() override {
    on_done_();
    delete this;
  }

 private:
  std::function<void()> on_done_;
};

}  // namespace

void ConfigureWorkerServer(grpc::ServerBuilder* builder) {
  builder->SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder->SetMaxSendMessageSize(kMaxMessageBytes);
  // The coordinator sends no keepalive pings (a dead rank on one host closes its socket); should it be told
  // to, pings as often as every ten seconds, also while a long step runs, are welcome instead of answered
  // with GOAWAY.
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
}

void WorkerService::SetLoadError(const std::string& error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  load_error_ = Utf8Text(error);
}

bool WorkerService::used() const { return open_calls_ > 0 || MonotonicMicros() - called_us_ < kUsedUs; }

void WorkerService::EndCall() {
  called_us_ = MonotonicMicros();
  --open_calls_;
}

grpc::ServerUnaryReactor* WorkerService::Describe(grpc::CallbackServerContext* context,
                                                  const v1::DescribeRequest*,
                                                  v1::DescribeResponse* response) {
  called_us_ = MonotonicMicros();
  response->set_ready(engine_->Describe(response));
  response->set_rank(static_cast<uint32_t>(identity_.rank));
  response->set_tp(static_cast<uint32_t>(identity_.tp));
  response->set_backend(identity_.backend);
  response->set_device(identity_.device);
  response->set_arch(identity_.arch);
  response->set_loaded_bytes(loaded_bytes_);
  response->set_total_bytes(total_bytes_);
  response->set_pid(static_cast<uint32_t>(getpid()));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    response->set_load_error(load_error_);
  }
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

grpc::ServerUnaryReactor* WorkerService::JoinGroup(grpc::CallbackServerContext* context,
                                                   const v1::JoinGroupRequest* request,
                                                   v1::JoinGroupResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  ++open_calls_;
  engine_->JoinGroup(*request, [this, reactor, response](absl::StatusOr<std::string> joined) {
    EndCall();
    if (joined.ok()) response->set_collective(*std::move(joined));
    reactor->Finish(joined.ok() ? grpc::Status::OK : ToGrpc(joined.status()));
  });
  return reactor;
}

grpc::ServerBidiReactor<v1::StepRequest, v1::StepResponse>* WorkerService::Steps(
    grpc::CallbackServerContext*) {
  ++open_calls_;
  return StepStream::Open(engine_, [this] { EndCall(); });
}

grpc::ServerUnaryReactor* WorkerService::Drain(grpc::CallbackServerContext*, const v1::DrainRequest* request,
                                               v1::DrainResponse* response) {
  auto* reactor = new DrainReactor([this, reason = request->reason()] { on_drained_(reason); });
  engine_->Drain([reactor, response](uint64_t steps) {
    response->set_steps(steps);
    reactor->Finish(grpc::Status::OK);
  });
  return reactor;
}

}  // namespace kdt
