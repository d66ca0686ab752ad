// Between the scheduler and one client's stream: buffers answers while the client is slower than the model.
#pragma once

#include <grpcpp/grpcpp.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "coordinator/scheduler/request.h"
#include "kdt/v1/generation.pb.h"

namespace kdt {

// The scheduler never waits for a client. While a write is under way, chunks of the same sample are joined,
// so a slow client gets fewer and larger chunks; one that leaves more than kMaxBufferedBytes unread loses its
// request. (Pausing it instead would let one idle client hold KV slots for as long as it likes.)
class ResponseQueue : public RequestSink {
 public:
  static constexpr size_t kMaxBufferedBytes = size_t{16} << 20;

  using Writer = grpc::ServerWriteReactor<grpc::ByteBuffer>;
  explicit ResponseQueue(Writer* writer) : writer_(writer) {}

  bool Push(v1::GenerateResponse&& response) override;
  void End(const absl::Status& status) override;

  // Of the reactor: a write ended; the call is over and `writer` about to be deleted.
  void OnWritten(bool ok);
  void Detach();

 private:
  void WriteNext();
  void FinishLocked();

  std::mutex mutex_;
  Writer* writer_;  // null once the call is over
  struct Waiting {
    v1::GenerateResponse response;
    size_t bytes;  // counted in buffered_bytes_
  };
  std::deque<Waiting> waiting_;
  size_t buffered_bytes_ = 0;
  grpc::ByteBuffer writing_;
  bool write_pending_ = false;
  bool ended_ = false;
  bool finished_ = false;
  absl::Status status_;
};

grpc::Status ToGrpc(const absl::Status& status);

}  // namespace kdt
