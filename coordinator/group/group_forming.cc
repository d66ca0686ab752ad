#include "coordinator/group/group_forming.h"

#include <unistd.h>

#include <algorithm>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/clock.h"
#include "common/log.h"
#include "common/status.h"
#include "common/worker_note.h"
#include "coordinator/group/descriptions.h"
#include "coordinator/group/join_calls.h"

namespace kdt {
namespace {

// Describe calls in a row without an answer from one who listens: the process is there and hangs. While ranks
// load, which may be all that a host can do, more patience is shown.
constexpr int kMaxSilences = 3;
constexpr int kMaxSilencesLoading = 12;
constexpr int64_t kProgressEveryUs = 2'000'000;

std::string NewCollectiveId(uint64_t epoch) {
  std::random_device random;
  return absl::StrFormat("kdt-%d-%d-%08x", getpid(), epoch, random());
}

bool Any(const std::vector<bool>& of_ranks) {
  return std::find(of_ranks.begin(), of_ranks.end(), true) != of_ranks.end();
}

}  // namespace

GroupForming::GroupForming(const RankLinks& links, FormingTimes times, Listener listener)
    : links_(links), times_(times), listener_(std::move(listener)), progress_(kProgressEveryUs) {}

// "2 of 4 ranks are ready; waiting for rank 1 (no answer), rank 3 (20 of 80 MiB loaded)".
std::string GroupForming::Progress(const std::vector<RankPoll::Heard>& heard) const {
  std::vector<std::string> missing;
  size_t ready = 0;
  for (size_t i = 0; i < heard.size(); ++i) {
    ready += heard[i].ready();
    if (heard[i].ready()) continue;
    const v1::DescribeResponse& rank = heard[i].description;
    const std::string state = heard[i].answered   ? absl::StrCat(rank.loaded_bytes() >> 20, " of ",
                                                                 rank.total_bytes() >> 20, " MiB loaded")
                              : ended_[i].empty() ? "no answer"
                                                  : absl::StrCat("no answer; ", ended_[i]);
    missing.push_back(absl::StrCat(links_[i]->Name(), " (", state, ")"));
  }
  return absl::StrCat(ready, " of ", heard.size(), " ranks are ready; waiting for ",
                      absl::StrJoin(missing, ", "));
}

void GroupForming::TakeIn(const std::vector<RankPoll::Heard>& heard) {
  for (uint32_t i = 0; i < heard.size(); ++i) {
    listener_.on_heard(i, heard[i]);
    const std::string& error = heard[i].description.load_error();
    const std::string why = !error.empty()      ? absl::StrCat("could not load: ", error)
                            : heard[i].answered ? ""
                                                : ReadLossNote(links_[i]->address());
    if (heard[i].ready()) ended_[i].clear();
    if (why.empty() || why == ended_[i]) continue;
    ended_[i] = why;
    listener_.on_rank_error(i, why);
  }
}

std::vector<bool> GroupForming::Silent(const std::vector<RankPoll::Heard>& heard, int silences) const {
  std::vector<bool> silent;
  for (const RankPoll::Heard& rank : heard) silent.push_back(rank.silences >= silences);
  return silent;
}

// A stopped or stuck process does not end by itself, so nobody who watches processes sees it. The ranks that
// are ready are ended instead: whoever started the group then starts all ranks again. Where none is, a note
// tells of those that hang.
std::string GroupForming::RestartAround(const std::vector<bool>& hung,
                                        const std::vector<RankPoll::Heard>& heard, int unanswered_ms) {
  const std::string silent = absl::StrCat(" not answered for ", unanswered_ms / 1000, " s");
  std::vector<std::string> names;
  bool any_ready = false;
  for (size_t i = 0; i < heard.size(); ++i) {
    any_ready = any_ready || (heard[i].ready() && !hung[i]);
    if (!hung[i]) continue;
    names.push_back(links_[i]->Name());
    listener_.on_rank_error(static_cast<uint32_t>(i), absl::StrCat("it has", silent, ": it hangs"));
  }
  const bool one = names.size() == 1;
  const std::string reason = absl::StrCat(absl::StrJoin(names, ", "), one ? " hangs" : " hang");
  spdlog::error("{} {}{}: {}; {}", absl::StrJoin(names, ", "), one ? "has" : "have", silent,
                one ? "it hangs" : "they hang",
                any_ready ? "the other ranks are ended so that all start again"
                          : "no other rank is ready, to be ended so that all start again");
  AtOnce(links_, [&](RankLink& link) {
    if (hung[link.rank()]) {
      if (any_ready) return;
      const bool told = WriteHangNote(link.address());
      spdlog::error("{}: {}", link.Name(),
                    told ? "its launcher is asked to kill it"
                         : "its launcher cannot be asked to kill it: end its process");
    } else if (heard[link.rank()].ready()) {
      const absl::Status drained = link.Drain(reason);
      if (!drained.ok()) spdlog::warn("{} was not ended: {}", link.Name(), drained.message());
    }
  });
  return reason;
}

absl::Status GroupForming::WaitLoaded(RankPoll* poll, uint64_t last_epoch,
                                      const std::function<bool()>& cancelled,
                                      std::vector<v1::DescribeResponse>* described) {
  ended_.resize(links_.size());
  bool restarted = false;  // behind a loss: a rank that was in no epoch yet has told that it loads
  const int64_t began_us = MonotonicMicros();
  while (true) {
    std::this_thread::sleep_for(std::chrono::milliseconds(kRankPollMs));
    std::vector<RankPoll::Heard> heard = poll->heard();
    TakeIn(heard);
    bool all_ready = true;
    for (size_t i = 0; i < heard.size(); ++i) {
      if (!heard[i].description.load_error().empty())
        return absl::FailedPreconditionError(absl::StrCat(links_[i]->Name(), " ", ended_[i]));
      all_ready = all_ready && heard[i].ready();
      // That of another rank counts too, as for a new coordinator.
      last_epoch = std::max(last_epoch, heard[i].description.last_epoch());
      restarted =
          restarted || (heard[i].answered && !heard[i].ready() && heard[i].description.last_epoch() == 0);
    }
    if (all_ready) {
      for (const RankPoll::Heard& rank : heard) described->push_back(rank.description);
      return absl::OkStatus();
    }
    if (cancelled()) return absl::CancelledError("forming the group was cancelled");
    const int patience = last_epoch > 0 && !restarted ? kMaxSilences : kMaxSilencesLoading;
    if (Any(Silent(heard, patience))) {
      // Those that hang like it are as far by now.
      std::this_thread::sleep_for(std::chrono::milliseconds(kRankPollMs));
      heard = poll->heard();
      const std::vector<bool> hung = Silent(heard, patience);
      if (Any(hung)) RestartAround(hung, heard, patience * times_.describe_ms);
      poll->ForgetSilences();
      continue;
    }
    const std::string waiting = Progress(heard);
    listener_.on_waiting(waiting);
    const int64_t now_us = MonotonicMicros();
    if (now_us - began_us >= kProgressEveryUs && progress_.Due(waiting, now_us)) {
      spdlog::info("{}", waiting);
    }
  }
}

absl::Status GroupForming::JoinAll(RankPoll* poll, uint64_t epoch, const std::function<bool()>& cancelled) {
  v1::JoinGroupRequest request;
  request.set_epoch(epoch);
  request.set_tp(static_cast<uint32_t>(links_.size()));
  request.set_collective_id(NewCollectiveId(epoch));
  request.set_timeout_ms(static_cast<uint32_t>(times_.join_ms));
  JoinCalls calls(links_, request);
  calls.Wait([&] { return cancelled() || Any(Silent(poll->heard(), kMaxSilences)); });

  size_t failed = 0;
  const bool all_ended = calls.all_ended();  // asked first: the last one may fail between the two
  const absl::Status failure = calls.failure(&failed);
  if (all_ended && failure.ok()) return absl::OkStatus();
  if (cancelled()) return absl::CancelledError("forming the group was cancelled");
  const std::vector<RankPoll::Heard> heard = poll->heard();
  std::vector<bool> hung = Silent(heard, kMaxSilences);
  int unanswered_ms = kMaxSilences * times_.describe_ms;
  if (!Any(hung)) {
    hung = calls.unanswered();
    unanswered_ms = times_.join_ms + kJoinGraceMs;
  }
  if (Any(hung)) return absl::UnavailableError(RestartAround(hung, heard, unanswered_ms));
  if (failure.ok()) return absl::UnavailableError("a rank did not answer for a while");
  listener_.on_rank_error(static_cast<uint32_t>(failed), absl::StrCat("could not join: ", failure.message()));
  return absl::Status(failure.code(), absl::StrCat(links_[failed]->Name(), ": ", failure.message()));
}

absl::StatusOr<FormedGroup> GroupForming::Form(uint64_t last_epoch, const std::function<bool()>& cancelled) {
  FormedGroup formed;
  RankPoll poll(links_, times_.describe_ms);
  KDT_RETURN_IF_ERROR(WaitLoaded(&poll, last_epoch, cancelled, &formed.ranks));
  KDT_ASSIGN_OR_RETURN(formed.limits, CheckDescriptions(formed.ranks));
  formed.epoch = last_epoch + 1;
  for (const auto& rank : formed.ranks) formed.epoch = std::max(formed.epoch, rank.last_epoch() + 1);
  const std::string joining = absl::StrCat("all ", links_.size(), " ranks are loaded; joining them");
  listener_.on_waiting(joining);
  if (joining_.Due(joining, MonotonicMicros())) spdlog::info("{} in epoch {}", joining, formed.epoch);
  KDT_RETURN_IF_ERROR(JoinAll(&poll, formed.epoch, cancelled));
  joining_.Forget();
  progress_.Forget();
  return formed;
}

}  // namespace kdt
