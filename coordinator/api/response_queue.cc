#include "coordinator/api/response_queue.h"

#include <string>
#include <utility>

#include "coordinator/api/client_text.h"

namespace kdt {

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.raw_code()), std::string(status.message()));
}

namespace {

// Appends a later chunk of the same sample to an earlier one that was not written yet.
void Join(v1::Chunk&& later, v1::Chunk* earlier) {
  earlier->mutable_token_ids()->MergeFrom(later.token_ids());
  earlier->mutable_text()->append(later.text());
  earlier->mutable_reasoning_text()->append(later.reasoning_text());
  for (auto& logprobs : *later.mutable_logprobs()) *earlier->add_logprobs() = std::move(logprobs);
  for (auto& call : *later.mutable_tool_calls()) *earlier->add_tool_calls() = std::move(call);
}

}  // namespace

bool ResponseQueue::Push(v1::GenerateResponse&& response) {
  std::lock_guard lock(mutex_);
  if (writer_ == nullptr || ended_) return true;  // nobody listens; the cancellation is on its way
  const size_t bytes = response.ByteSizeLong();
  // One answer alone may be larger, as the log-probabilities of a long prompt are.
  if (buffered_bytes_ + bytes > kMaxBufferedBytes && !waiting_.empty()) return false;
  buffered_bytes_ += bytes;
  const bool joins = write_pending_ && response.has_chunk() && !waiting_.empty() &&
                     waiting_.back().response.has_chunk() &&
                     waiting_.back().response.index() == response.index();
  if (joins) {
    Join(std::move(*response.mutable_chunk()), waiting_.back().response.mutable_chunk());
    waiting_.back().bytes += bytes;
  } else {
    waiting_.push_back({std::move(response), bytes});
  }
  if (!write_pending_) WriteNext();
  return true;
}

void ResponseQueue::End(const absl::Status& status) {
  std::lock_guard lock(mutex_);
  if (ended_) return;
  ended_ = true;
  status_ = status;
  if (!status.ok()) waiting_.clear();  // an error need not wait for a slow reader
  if (!write_pending_ && waiting_.empty()) FinishLocked();
}

void ResponseQueue::OnWritten(bool ok) {
  std::lock_guard lock(mutex_);
  write_pending_ = false;
  if (!ok) waiting_.clear();  // the client is gone
  if (!waiting_.empty()) {
    WriteNext();
  } else if (ended_) {
    FinishLocked();
  }
}

void ResponseQueue::Detach() {
  std::lock_guard lock(mutex_);
  writer_ = nullptr;
  waiting_.clear();
}

void ResponseQueue::WriteNext() {
  writing_ = ToBytes(waiting_.front().response);
  buffered_bytes_ -= waiting_.front().bytes;
  waiting_.pop_front();
  write_pending_ = true;
  if (writer_ != nullptr) writer_->StartWrite(&writing_);
}

void ResponseQueue::FinishLocked() {
  if (finished_ || writer_ == nullptr) return;
  finished_ = true;
  writer_->Finish(ToGrpc(status_));
}

}  // namespace kdt
