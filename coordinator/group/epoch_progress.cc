#include "coordinator/group/epoch_progress.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kdt/v1/worker.pb.h"

namespace kdt {
namespace {

// Errors of a rank that could not go on because another did not.
bool WaitedForPeer(absl::StatusCode code) {
  return code == absl::StatusCode::kDeadlineExceeded || code == absl::StatusCode::kUnavailable ||
         code == absl::StatusCode::kCancelled || code == absl::StatusCode::kAborted;
}

}  // namespace

void EpochProgress::Begin(size_t ranks) {
  step_ = 0;
  failed_ = false;
  deaths_ = 0;
  ranks_.assign(ranks, {});
}

bool EpochProgress::AllAnswered(uint64_t step) const {
  return std::all_of(ranks_.begin(), ranks_.end(),
                     [step](const Rank& rank) { return rank.answered >= step; });
}

bool EpochProgress::Take(uint32_t rank, const v1::StepResponse& response) {
  Rank& mine = ranks_[rank];
  if (response.error_code() != 0) {
    Fail(rank, absl::StrCat("step ", response.step(), " failed: ", response.error()),
         WaitedForPeer(static_cast<absl::StatusCode>(response.error_code())));
    return false;
  }
  if (response.rank() != rank || response.step() != mine.answered + 1 || response.step() > step_) {
    Fail(rank, absl::StrCat("it answered as rank ", response.rank(), " to step ", response.step(),
                            " when step ", mine.answered + 1, " was due"));
    return false;
  }
  if (rank == 0) rank0_digest_before_ = mine.digest;
  mine.answered = response.step();
  mine.digest = response.digest();
  if (rank != 0) {
    Compare(rank);
  } else {
    for (uint32_t other = 1; other < ranks_.size(); ++other) Compare(other);
  }
  return true;
}

// Rank 0's digests of its last two steps are at hand, and no rank is further behind than one step.
void EpochProgress::Compare(uint32_t rank) {
  const Rank& zero = ranks_[0];
  const Rank& mine = ranks_[rank];
  if (mine.answered == 0 || zero.answered < mine.answered) return;  // compared when rank 0 answers
  const uint64_t expected = zero.answered == mine.answered ? zero.digest : rank0_digest_before_;
  if (zero.answered > mine.answered + 1 || mine.digest == expected) return;
  Fail(rank,
       absl::StrCat("its state differs from that of rank 0 after step ", mine.answered, " (digests differ)"));
}

void EpochProgress::Fail(uint32_t rank, std::string what, bool waited_for_peer) {
  failed_ = true;
  Rank& mine = ranks_[rank];
  if (!mine.failure.empty() && !mine.waited_for_peer) return;
  mine.failure = std::move(what);
  mine.waited_for_peer = waited_for_peer;
}

void EpochProgress::Died(uint32_t rank, std::string what) {
  Fail(rank, std::move(what));
  ranks_[rank].died = ++deaths_;
}

void EpochProgress::FailLate(int step_timeout_ms) {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_[rank].answered < step_)
      Fail(rank, absl::StrCat("no answer to step ", step_, " within ", step_timeout_ms, " ms"));
  }
}

EpochProgress::Blame EpochProgress::blame() const {
  const auto find = [this](auto matches) { return std::find_if(ranks_.begin(), ranks_.end(), matches); };
  auto found = find([](const Rank& rank) { return rank.died == 1; });
  if (found == ranks_.end())
    found = find([](const Rank& rank) { return !rank.failure.empty() && !rank.waited_for_peer; });
  if (found == ranks_.end())
    found = find([this](const Rank& rank) { return rank.answered < step_ && rank.failure.empty(); });
  if (found == ranks_.end()) found = find([](const Rank& rank) { return !rank.failure.empty(); });
  KDT_CHECK(found != ranks_.end());
  const std::string what =
      found->failure.empty() ? absl::StrCat("it left the others waiting in step ", step_) : found->failure;
  return {static_cast<uint32_t>(found - ranks_.begin()), what};
}

}  // namespace kdt
