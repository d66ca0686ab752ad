#include "coordinator/group/join_calls.h"

#include <chrono>
#include <utility>

#include "coordinator/group/rank_poll.h"

namespace kdt {

JoinCalls::JoinCalls(const RankLinks& links, const v1::JoinGroupRequest& request)
    : unanswered_(links.size()) {
  for (size_t i = 0; i < links.size(); ++i) contexts_.push_back(std::make_unique<grpc::ClientContext>());
  for (const auto& link : links) {
    v1::JoinGroupRequest mine = request;
    mine.set_rank(link->rank());
    threads_.emplace_back([this, link = link.get(), mine = std::move(mine)] { Call(link, mine); });
  }
}

JoinCalls::~JoinCalls() {
  for (auto& context : contexts_) context->TryCancel();
  for (std::thread& thread : threads_) thread.join();
}

void JoinCalls::Call(RankLink* link, v1::JoinGroupRequest request) {
  grpc::ClientContext* context = contexts_[link->rank()].get();
  const absl::Status joined =
      link->Join(request, static_cast<int>(request.timeout_ms()) + kJoinGraceMs, context).status();
  const std::lock_guard lock(mutex_);
  ++ended_;
  unanswered_[link->rank()] =
      absl::IsDeadlineExceeded(joined) && std::chrono::system_clock::now() >= context->deadline();
  const bool first =
      failure_.ok() || (absl::IsDeadlineExceeded(failure_) && !absl::IsDeadlineExceeded(joined));
  if (!joined.ok() && first) {
    failure_ = joined;
    failed_ = link->rank();
  }
  changed_.notify_all();
}

void JoinCalls::Wait(const std::function<bool()>& given_up) {
  std::unique_lock lock(mutex_);
  const auto settled = [&] {
    return ended_ == contexts_.size() || (!failure_.ok() && !absl::IsDeadlineExceeded(failure_));
  };
  while (!changed_.wait_for(lock, std::chrono::milliseconds(kRankPollMs), settled) && !given_up()) {
  }
}

absl::Status JoinCalls::failure(size_t* rank) const {
  const std::lock_guard lock(mutex_);
  *rank = failed_;
  return failure_;
}

bool JoinCalls::all_ended() const {
  const std::lock_guard lock(mutex_);
  return ended_ == contexts_.size();
}

std::vector<bool> JoinCalls::unanswered() const {
  const std::lock_guard lock(mutex_);
  return unanswered_;
}

}  // namespace kdt
