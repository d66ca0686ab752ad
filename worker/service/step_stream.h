// One open Steps stream: requests go to the engine's thread in order, answers come back in order.
#pragma once

#include <grpcpp/grpcpp.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "kdt/v1/worker.pb.h"
#include "worker/service/engine_thread.h"

namespace kdt {

// Owns itself: gRPC keeps it until OnDone, steps under way keep it through shared_from_this.
class StepStream : public grpc::ServerBidiReactor<v1::StepRequest, v1::StepResponse>,
                   public std::enable_shared_from_this<StepStream> {
 public:
  // Starts to read. `on_done` is called once the stream has ended.
  static StepStream* Open(EngineThread* engine, std::function<void()> on_done);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  StepStream(EngineThread* engine, std::function<void()> on_done)
      : engine_(engine), on_done_(std::move(on_done)) {}
  void Answer(v1::StepResponse response);
  // Under the mutex: finishes the call once the client has stopped sending and every answer is written.
  void MaybeFinish();
  void EndEpoch();

  EngineThread* const engine_;
  const std::function<void()> on_done_;
  std::shared_ptr<StepStream> self_;  // until OnDone
  v1::StepRequest incoming_;

  std::mutex mutex_;
  std::deque<v1::StepResponse> answers_;  // the front one is being written
  int under_way_ = 0;                     // steps handed to the engine and not answered
  bool reads_over_ = false;
  bool broken_ = false;  // cancelled or a write failed: nothing is written any more
  bool finished_ = false;
  // The epoch that ends with this stream: the one it was opened in; else that of its first request.
  uint64_t epoch_ = 0;
};

}  // namespace kdt
