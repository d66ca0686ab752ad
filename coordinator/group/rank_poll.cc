#include "coordinator/group/rank_poll.h"

#include <chrono>
#include <utility>

namespace kdt {

RankPoll::RankPoll(const RankLinks& links, int timeout_ms)
    : links_(links), timeout_ms_(timeout_ms), heard_(links.size()), calls_(links.size(), nullptr) {
  for (size_t rank = 0; rank < links.size(); ++rank) threads_.emplace_back([this, rank] { Ask(rank); });
}

RankPoll::~RankPoll() {
  {
    const std::lock_guard lock(mutex_);
    end_ = true;
    for (grpc::ClientContext* call : calls_) {
      if (call != nullptr) call->TryCancel();
    }
  }
  ended_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

std::vector<RankPoll::Heard> RankPoll::heard() const {
  const std::lock_guard lock(mutex_);
  return heard_;
}

void RankPoll::ForgetSilences() {
  const std::lock_guard lock(mutex_);
  for (Heard& rank : heard_) rank.silences = 0;
}

void RankPoll::Ask(size_t rank) {
  std::unique_lock lock(mutex_);
  while (!end_) {
    grpc::ClientContext context;
    calls_[rank] = &context;
    lock.unlock();
    auto answer = links_[rank]->Describe(timeout_ms_, &context);
    lock.lock();
    calls_[rank] = nullptr;
    Heard& heard = heard_[rank];
    heard.asked = true;
    heard.answered = answer.ok();
    // Not listening yet is another error; who watches the processes tells when it died.
    heard.silences = absl::IsDeadlineExceeded(answer.status()) ? heard.silences + 1 : 0;
    heard.description = answer.ok() ? *std::move(answer) : v1::DescribeResponse();
    ended_.wait_for(lock, std::chrono::milliseconds(kRankPollMs), [this] { return end_; });
  }
}

}  // namespace kdt
