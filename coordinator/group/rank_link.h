// The connection to one rank: unary calls while the group forms, then the step stream of one epoch.
#pragma once

#include <grpcpp/completion_queue.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kdt/v1/worker.grpc.pb.h"

namespace kdt {

// A rank that is asked to end answers behind its step, which ends with its stream; longer waits only one that
// hangs.
constexpr int kDrainTimeoutMs = 2'000;

// How the workers are reached.
struct RankSecurity {
  std::shared_ptr<grpc::ChannelCredentials> credentials;  // null: plaintext
  std::string server_name;  // in the workers' certificates; empty: the host in their address
};

// The step stream is driven by one completion queue that the scheduler's thread polls itself: rank 0's answer
// reaches the thread that waits for it without a hop over another one. All stream methods belong to that
// thread.
class RankLink {
 public:
  enum class Event { kStarted, kRead, kWritten, kFinished };
  // What a completion queue tag points to.
  struct Tag {
    RankLink* link;
    Event event;
  };

  RankLink(uint32_t rank, std::string address, const RankSecurity& security = {});
  ~RankLink();

  uint32_t rank() const { return rank_; }
  const std::string& address() const { return address_; }
  std::string Name() const;  // "rank 3"

  // Unary, blocking up to `timeout_ms`; with a context CANCELLED soon after another thread calls its
  // TryCancel(). UNAVAILABLE while nobody listens.
  absl::StatusOr<v1::DescribeResponse> Describe(int timeout_ms, grpc::ClientContext* context);
  absl::StatusOr<v1::JoinGroupResponse> Join(const v1::JoinGroupRequest& request, int timeout_ms,
                                             grpc::ClientContext* context);
  // Asks the worker to end; up to kDrainTimeoutMs.
  absl::Status Drain(const std::string& reason);

  // Opens the step stream; its events arrive in `queue`.
  void OpenStream(grpc::CompletionQueue* queue);
  // The bytes are shared, not copied. Not while write_pending().
  void Write(const grpc::ByteBuffer& request);
  bool write_pending() const { return write_pending_; }
  // Takes one event in; for kRead, true when a message was read (call ReadMessage, which also asks for the
  // next). Failed operations end in kFinished, after which finished() and end_status() tell why.
  bool OnEvent(Event event, bool ok);
  absl::Status ReadMessage(v1::StepResponse* response);
  void Cancel();
  bool finished() const { return finished_; }
  absl::Status end_status() const;

 private:
  void Read();
  void Finish();

  const uint32_t rank_;
  const std::string address_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Worker::Stub> stub_;
  grpc::GenericStub generic_;

  std::unique_ptr<grpc::ClientContext> context_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
  grpc::ByteBuffer incoming_;
  grpc::Status status_;
  Tag tags_[4];
  bool write_pending_ = false;
  bool finishing_ = false;
  bool finished_ = true;  // no stream is open
};

using RankLinks = std::vector<std::unique_ptr<RankLink>>;  // by rank

// Runs `call` for every link at the same time and waits for all.
void AtOnce(const RankLinks& links, const std::function<void(RankLink&)>& call);

}  // namespace kdt
