#include "worker/service/step_stream.h"

#include <utility>

namespace kdt {

StepStream* StepStream::Open(EngineThread* engine, std::function<void()> on_done) {
  std::shared_ptr<StepStream> stream(new StepStream(engine, std::move(on_done)));
  stream->self_ = stream;
  stream->epoch_ = engine->epoch();
  stream->StartRead(&stream->incoming_);
  return stream.get();
}

void StepStream::OnReadDone(bool ok) {
  if (!ok) {
    EndEpoch();
    const std::lock_guard<std::mutex> lock(mutex_);
    reads_over_ = true;
    MaybeFinish();
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (epoch_ == 0) epoch_ = incoming_.epoch();
    ++under_way_;
  }
  engine_->Step(std::exchange(incoming_, {}), [stream = shared_from_this()](v1::StepResponse response) {
    stream->Answer(std::move(response));
  });
  StartRead(&incoming_);
}

void StepStream::Answer(v1::StepResponse response) {
  const std::lock_guard<std::mutex> lock(mutex_);
  --under_way_;
  if (broken_ || finished_) {
    MaybeFinish();
    return;
  }
  answers_.push_back(std::move(response));
  if (answers_.size() == 1) StartWrite(&answers_.front());
}

void StepStream::OnWriteDone(bool ok) {
  const std::lock_guard<std::mutex> lock(mutex_);
  answers_.pop_front();
  if (!ok) {
    broken_ = true;
    answers_.clear();
  }
  if (!answers_.empty()) {
    StartWrite(&answers_.front());
  } else {
    MaybeFinish();
  }
}

void StepStream::MaybeFinish() {
  const bool idle = under_way_ == 0 && answers_.empty();
  if (finished_ || !reads_over_ || !idle) return;
  finished_ = true;
  Finish(broken_ ? grpc::Status::CANCELLED : grpc::Status::OK);
}

void StepStream::OnCancel() {
  EndEpoch();
  const std::lock_guard<std::mutex> lock(mutex_);
  broken_ = true;
}

void StepStream::EndEpoch() {
  uint64_t epoch = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    epoch = epoch_;
  }
  if (epoch != 0) engine_->EndEpoch(epoch);
}

void StepStream::OnDone() {
  EndEpoch();
  on_done_();
  self_.reset();
}

}  // namespace kdt
