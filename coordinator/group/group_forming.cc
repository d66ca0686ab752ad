#include "coordinator/group/group_forming.h"

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/clock.h"
#include "common/log.h"
#include "common/loss_note.h"
#include "common/status.h"

namespace kdt {
namespace {

constexpr int kMaxSilences = 3;  // Describe calls in a row without an answer: the process is there and hangs
constexpr int64_t kProgressEveryUs = 2'000'000;
constexpr int64_t kUnchangedEveryUs = 10'000'000;  // when there is nothing new to tell
constexpr int kDrainTimeoutMs = 5000;
constexpr int kJoinTimeoutMs = 60'000;
constexpr int kJoinGraceMs = 5'000;  // so that a rank's own time-out, which names its peer, comes first

std::string NewCollectiveId(uint64_t epoch) {
  std::random_device random;
  return absl::StrFormat("kdt-%d-%d-%08x", getpid(), epoch, random());
}

// Once a rank has failed or `cancelled` says so, the others are not waited for: they would wait in vain.
// `failed` is the rank whose error this returns, when it is one's.
absl::Status JoinAll(const RankLinks& links, uint64_t epoch, const std::function<bool()>& cancelled,
                     const RankLink** failed) {
  v1::JoinGroupRequest request;
  request.set_epoch(epoch);
  request.set_tp(static_cast<uint32_t>(links.size()));
  request.set_collective_id(NewCollectiveId(epoch));
  request.set_timeout_ms(kJoinTimeoutMs);
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts(links.size());
  for (auto& context : contexts) context = std::make_unique<grpc::ClientContext>();
  std::mutex mutex;  // over all below
  std::condition_variable changed;
  size_t ended = 0;
  absl::Status failure;  // the first; one of a rank by itself says more than that of one which waited for it
  bool gave_up = false;
  std::vector<std::thread> threads;
  for (size_t i = 0; i < links.size(); ++i) {
    threads.emplace_back([&, i, mine = request]() mutable {
      mine.set_rank(static_cast<uint32_t>(i));
      const absl::Status joined =
          links[i]->Join(mine, kJoinTimeoutMs + kJoinGraceMs, contexts[i].get()).status();
      const std::lock_guard lock(mutex);
      ++ended;
      const bool first =
          failure.ok() || (absl::IsDeadlineExceeded(failure) && !absl::IsDeadlineExceeded(joined));
      if (!joined.ok() && first && !gave_up) {
        failure = joined;
        *failed = links[i].get();
      }
      changed.notify_all();
    });
  }
  {
    std::unique_lock lock(mutex);
    const auto settled = [&] {
      return ended == links.size() || (!failure.ok() && !absl::IsDeadlineExceeded(failure));
    };
    while (!changed.wait_for(lock, std::chrono::milliseconds(kRankPollMs), settled) && !cancelled()) {
    }
    gave_up = ended < links.size();
    if (gave_up && failure.ok()) failure = absl::CancelledError("forming the group was cancelled");
  }
  if (gave_up) {
    for (auto& context : contexts) context->TryCancel();
  }
  for (std::thread& thread : threads) thread.join();
  return failure;
}

}  // namespace

absl::StatusOr<GroupLimits> CheckDescriptions(const std::vector<v1::DescribeResponse>& ranks) {
  GroupLimits limits;
  const v1::DescribeResponse& first = ranks.front();
  limits.kv_slots = first.kv_slots_total();
  limits.max_rows = first.max_rows();
  limits.max_tree_nodes = first.max_tree_nodes();
  limits.max_sequences = first.max_sequences();
  limits.max_context = first.max_context();
  limits.draft_block_size = first.draft_block_size();
  limits.max_draft_top_k = first.max_draft_top_k();
  limits.checkpoint_digest = first.checkpoint_digest();
  for (size_t i = 0; i < ranks.size(); ++i) {
    const v1::DescribeResponse& rank = ranks[i];
    const auto fail = [i](const std::string& what) {
      return absl::InvalidArgumentError(absl::StrCat("rank ", i, ": ", what));
    };
    if (rank.rank() != i) return fail(absl::StrCat("the worker at this address is rank ", rank.rank()));
    if (rank.tp() != ranks.size()) {
      return fail(
          absl::StrCat("the worker was started for tp ", rank.tp(), ", the group has ", ranks.size()));
    }
    if (rank.checkpoint_digest() != first.checkpoint_digest()) {
      return fail("its checkpoint is not that of rank 0 (checkpoint_digest differs)");
    }
    const auto same_text = [&](const char* what, const std::string& mine,
                               const std::string& zero) -> absl::Status {
      if (mine == zero) return absl::OkStatus();
      return fail(absl::StrCat(what, " is ", mine, ", that of rank 0 is ", zero));
    };
    KDT_RETURN_IF_ERROR(same_text("backend", rank.backend(), first.backend()));
    // Kernels and collectives are laid out for one number of multiprocessors and one instruction set, and all
    // ranks wait for the slowest.
    if (rank.backend() == "cuda") {
      KDT_RETURN_IF_ERROR(same_text("its GPU", rank.device(), first.device()));
      KDT_RETURN_IF_ERROR(same_text("its GPU's architecture", rank.arch(), first.arch()));
    }
    KDT_RETURN_IF_ERROR(same_text("kv_dtype", rank.kv_dtype(), first.kv_dtype()));
    const auto same = [&](const char* what, uint64_t mine, uint64_t zero) -> absl::Status {
      if (mine == zero) return absl::OkStatus();
      return fail(absl::StrCat(what, " is ", mine, ", that of rank 0 is ", zero));
    };
    KDT_RETURN_IF_ERROR(same("kv_slots_total", rank.kv_slots_total(), first.kv_slots_total()));
    KDT_RETURN_IF_ERROR(same("max_rows", rank.max_rows(), first.max_rows()));
    KDT_RETURN_IF_ERROR(same("max_tree_nodes", rank.max_tree_nodes(), first.max_tree_nodes()));
    KDT_RETURN_IF_ERROR(same("max_sequences", rank.max_sequences(), first.max_sequences()));
    KDT_RETURN_IF_ERROR(same("draft_block_size", rank.draft_block_size(), first.draft_block_size()));
    KDT_RETURN_IF_ERROR(same("max_context", rank.max_context(), first.max_context()));
    KDT_RETURN_IF_ERROR(same("max_draft_top_k", rank.max_draft_top_k(), first.max_draft_top_k()));
    if (rank.max_rows() == 0 || rank.max_sequences() == 0 || rank.kv_slots_total() == 0 ||
        rank.max_tree_nodes() == 0) {
      return fail("max_rows, max_tree_nodes, max_sequences and kv_slots_total must not be 0");
    }
  }
  return limits;
}

bool SeldomLine::Due(const std::string& line, int64_t now_us) {
  const int64_t pause_us = now_us - told_us_;
  if (told_us_ != 0 && pause_us < (line == told_ ? kUnchangedEveryUs : shortest_us_)) return false;
  told_ = line;
  told_us_ = now_us;
  return true;
}

GroupForming::GroupForming(const RankLinks& links, int describe_timeout_ms, Listener listener)
    : links_(links),
      describe_timeout_ms_(describe_timeout_ms),
      listener_(std::move(listener)),
      progress_(kProgressEveryUs) {}

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

// A stopped or stuck process does not end by itself, so nobody who watches processes sees it. The ranks that
// are ready are ended instead: whoever started the group then starts all ranks again.
void GroupForming::EndTheOthers(const std::vector<RankPoll::Heard>& heard) {
  const std::string silent =
      absl::StrCat(" not answered for ", kMaxSilences * describe_timeout_ms_ / 1000, " s");
  std::vector<std::string> hung;
  bool any = false;
  for (size_t i = 0; i < heard.size(); ++i) {
    any = any || heard[i].ready();
    if (heard[i].silences < kMaxSilences) continue;
    hung.push_back(links_[i]->Name());
    listener_.on_rank_error(static_cast<uint32_t>(i), absl::StrCat("it has", silent, ": it hangs"));
  }
  const std::string names = absl::StrJoin(hung, ", ");
  const bool one = hung.size() == 1;
  spdlog::error("{} {}{}: {}; {}", names, one ? "has" : "have", silent, one ? "it hangs" : "they hang",
                any ? "the other ranks are ended so that all start again"
                    : "no other rank is ready, to be ended so that all start again: end its process");
  const std::string reason = absl::StrCat(names, one ? " hangs" : " hang");
  AtOnce(links_, [&](RankLink& link) {
    if (!heard[link.rank()].ready()) return;
    const absl::Status drained = link.Drain(reason, kDrainTimeoutMs);
    if (!drained.ok()) spdlog::warn("{} was not ended: {}", link.Name(), drained.message());
  });
}

absl::Status GroupForming::WaitLoaded(uint64_t last_epoch, const std::function<bool()>& cancelled,
                                      std::vector<v1::DescribeResponse>* described) {
  ended_.resize(links_.size());
  RankPoll poll(links_, describe_timeout_ms_);
  const int64_t began_us = MonotonicMicros();
  while (true) {
    std::this_thread::sleep_for(std::chrono::milliseconds(kRankPollMs));
    const std::vector<RankPoll::Heard> heard = poll.heard();
    TakeIn(heard);
    bool all_ready = true, hangs = false;
    for (size_t i = 0; i < heard.size(); ++i) {
      if (!heard[i].description.load_error().empty())
        return absl::FailedPreconditionError(absl::StrCat(links_[i]->Name(), " ", ended_[i]));
      all_ready = all_ready && heard[i].ready();
      hangs = hangs || heard[i].silences >= kMaxSilences;
      last_epoch = std::max(last_epoch, heard[i].description.last_epoch());
    }
    if (all_ready) {
      for (const RankPoll::Heard& rank : heard) described->push_back(rank.description);
      return absl::OkStatus();
    }
    if (cancelled()) return absl::CancelledError("forming the group was cancelled");
    if (hangs && last_epoch > 0) {
      // Those that hang like it are as far by now.
      std::this_thread::sleep_for(std::chrono::milliseconds(kRankPollMs));
      EndTheOthers(poll.heard());
      poll.ForgetSilences();
    } else {
      const std::string waiting = Progress(heard);
      listener_.on_waiting(waiting);
      const int64_t now_us = MonotonicMicros();
      if (now_us - began_us >= kProgressEveryUs && progress_.Due(waiting, now_us)) {
        spdlog::info("{}", waiting);
      }
    }
  }
}

absl::StatusOr<FormedGroup> GroupForming::Form(uint64_t last_epoch, const std::function<bool()>& cancelled) {
  FormedGroup formed;
  KDT_RETURN_IF_ERROR(WaitLoaded(last_epoch, cancelled, &formed.ranks));
  KDT_ASSIGN_OR_RETURN(formed.limits, CheckDescriptions(formed.ranks));
  formed.epoch = last_epoch + 1;
  for (const auto& rank : formed.ranks) formed.epoch = std::max(formed.epoch, rank.last_epoch() + 1);
  const std::string joining = absl::StrCat("all ", links_.size(), " ranks are loaded; joining them");
  listener_.on_waiting(joining);
  if (joining_.Due(joining, MonotonicMicros())) spdlog::info("{} in epoch {}", joining, formed.epoch);
  const RankLink* failed = nullptr;
  const absl::Status joined = JoinAll(links_, formed.epoch, cancelled, &failed);
  if (failed != nullptr) {
    listener_.on_rank_error(failed->rank(), absl::StrCat("could not join: ", joined.message()));
    return absl::Status(joined.code(), absl::StrCat(failed->Name(), ": ", joined.message()));
  }
  KDT_RETURN_IF_ERROR(joined);
  joining_.Forget();
  progress_.Forget();
  return formed;
}

}  // namespace kdt
