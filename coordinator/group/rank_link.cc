#include "coordinator/group/rank_link.h"

#include <chrono>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace kdt {
namespace {

// Derived from the largest answer: 1024 rows of prompt log-probabilities with 64 candidates are below 2 MB.
constexpr int kMaxMessageBytes = 64 << 20;
constexpr int kReconnectMs = 100;
constexpr int kConnectMs = 120'000;
constexpr char kStepsMethod[] = "/kdt.v1.Worker/Steps";

absl::Status ToAbsl(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

std::shared_ptr<grpc::Channel> Connect(const std::string& address, const RankSecurity& security) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  // A rank of its own: its failures must not delay the reconnection to another one.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kReconnectMs);
  // Not a pause: how long a connection may take. For so long one who listens and says nothing is silent;
  // behind it, it looks like one who does not listen.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 10 * kReconnectMs);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);  // a step is never sent twice
  if (!security.server_name.empty()) arguments.SetSslTargetNameOverride(security.server_name);
  return grpc::CreateCustomChannel(
      address, security.credentials == nullptr ? grpc::InsecureChannelCredentials() : security.credentials,
      arguments);
}

void SetTimeout(grpc::ClientContext* context, int timeout_ms) {
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(timeout_ms));
}

}  // namespace

RankLink::RankLink(uint32_t rank, std::string address, const RankSecurity& security)
    : rank_(rank),
      address_(std::move(address)),
      channel_(Connect(address_, security)),
      stub_(v1::Worker::NewStub(channel_)),
      generic_(channel_) {
  for (int event = 0; event < 4; ++event) tags_[event] = {this, static_cast<Event>(event)};
}

RankLink::~RankLink() { KDT_CHECK(finished_); }

std::string RankLink::Name() const { return absl::StrCat("rank ", rank_); }

absl::StatusOr<v1::DescribeResponse> RankLink::Describe(int timeout_ms, grpc::ClientContext* context) {
  SetTimeout(context, timeout_ms);
  v1::DescribeResponse response;
  KDT_RETURN_IF_ERROR(ToAbsl(stub_->Describe(context, {}, &response)));
  return response;
}

absl::StatusOr<v1::JoinGroupResponse> RankLink::Join(const v1::JoinGroupRequest& request, int timeout_ms,
                                                     grpc::ClientContext* context) {
  SetTimeout(context, timeout_ms);
  v1::JoinGroupResponse response;
  KDT_RETURN_IF_ERROR(ToAbsl(stub_->JoinGroup(context, request, &response)));
  return response;
}

absl::Status RankLink::Drain(const std::string& reason) {
  grpc::ClientContext context;
  SetTimeout(&context, kDrainTimeoutMs);
  v1::DrainRequest request;
  request.set_reason(reason);
  v1::DrainResponse response;
  return ToAbsl(stub_->Drain(&context, request, &response));
}

void RankLink::OpenStream(grpc::CompletionQueue* queue) {
  KDT_CHECK(finished_);
  finished_ = finishing_ = false;
  status_ = grpc::Status::OK;
  stream_.reset();  // it lives in memory of the call, which ends with the context
  context_ = std::make_unique<grpc::ClientContext>();
  stream_ = generic_.PrepareCall(context_.get(), kStepsMethod, queue);
  write_pending_ = true;  // nothing may be written before the call has started
  stream_->StartCall(&tags_[static_cast<int>(Event::kStarted)]);
}

void RankLink::Write(const grpc::ByteBuffer& request) {
  KDT_CHECK(!write_pending_);
  write_pending_ = true;
  stream_->Write(request, &tags_[static_cast<int>(Event::kWritten)]);
}

void RankLink::Read() { stream_->Read(&incoming_, &tags_[static_cast<int>(Event::kRead)]); }

void RankLink::Finish() {
  if (finishing_) return;
  finishing_ = true;
  stream_->Finish(&status_, &tags_[static_cast<int>(Event::kFinished)]);
}

bool RankLink::OnEvent(Event event, bool ok) {
  switch (event) {
    case Event::kStarted:
      write_pending_ = false;
      if (ok) {
        Read();
      } else {
        Finish();
      }
      return false;
    case Event::kWritten:
      write_pending_ = false;
      return false;  // a failed write also fails the read that is always pending
    case Event::kRead:
      if (!ok) Finish();
      return ok;
    case Event::kFinished:
      finished_ = true;
      return false;
  }
  return false;
}

absl::Status RankLink::ReadMessage(v1::StepResponse* response) {
  const grpc::Status parsed = grpc::SerializationTraits<v1::StepResponse>::Deserialize(&incoming_, response);
  Read();
  return ToAbsl(parsed);
}

void RankLink::Cancel() {
  if (!finished_) context_->TryCancel();
}

absl::Status RankLink::end_status() const {
  const absl::Status status = ToAbsl(status_);
  return status.ok() ? absl::UnavailableError("the worker ended the step stream") : status;
}

void AtOnce(const RankLinks& links, const std::function<void(RankLink&)>& call) {
  std::vector<std::thread> threads;
  for (const auto& link : links) threads.emplace_back([&call, &link] { call(*link); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace kdt
