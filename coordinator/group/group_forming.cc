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
#include "common/status.h"

namespace kdt {
namespace {

constexpr int kDescribeTimeoutMs = 5000;
constexpr int kMaxSilences = 3;  // Describe calls in a row without an answer: the process is there and hangs
constexpr int kPollMs = 50;
constexpr int64_t kProgressEveryUs = 2'000'000;
constexpr int64_t kUnchangedEveryUs = 30'000'000;  // when there is nothing new to tell
constexpr int kJoinTimeoutMs = 60'000;
constexpr int kJoinGraceMs = 5'000;  // so that a rank's own time-out, which names its peer, comes first

absl::Status RankError(const RankLink& link, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(link.Name(), ": ", status.message()));
}

// A stopped or stuck process does not end by itself, so nobody who watches processes sees it. The ranks that
// are ready are ended instead: whoever started the group then starts all ranks again.
void EndTheOthers(const std::vector<std::unique_ptr<RankLink>>& links, const std::vector<bool>& ready,
                  const RankLink& hung) {
  const bool any = std::find(ready.begin(), ready.end(), true) != ready.end();
  spdlog::error("{} has not answered for {} s: it hangs; {}", hung.Name(),
                kMaxSilences * kDescribeTimeoutMs / 1000,
                any ? "the other ranks are ended so that all start again"
                    : "no other rank is ready, to be ended so that all start again: end its process");
  for (size_t i = 0; i < links.size(); ++i) {
    if (!ready[i]) continue;
    const absl::Status drained = links[i]->Drain(kDescribeTimeoutMs);
    if (!drained.ok()) spdlog::warn("{} was not ended: {}", links[i]->Name(), drained.message());
  }
}

// "2 of 4 ranks are ready; waiting for rank 1 (no answer), rank 3 (20 of 80 MiB loaded)".
std::string Progress(const std::vector<std::unique_ptr<RankLink>>& links, const std::vector<bool>& ready,
                     const std::vector<v1::DescribeResponse>& described) {
  std::vector<std::string> missing;
  for (size_t i = 0; i < links.size(); ++i) {
    if (ready[i]) continue;
    const v1::DescribeResponse& rank = described[i];
    missing.push_back(rank.tp() == 0 ? absl::StrCat(links[i]->Name(), " (no answer)")
                                     : absl::StrCat(links[i]->Name(), " (", rank.loaded_bytes() >> 20, " of ",
                                                    rank.total_bytes() >> 20, " MiB loaded)"));
  }
  return absl::StrCat(std::count(ready.begin(), ready.end(), true), " of ", links.size(),
                      " ranks are ready; waiting for ", absl::StrJoin(missing, ", "));
}

// Waits until all ranks are ready at once: one that was may have ended since, as when all are started again
// behind a loss. The first error that ends the wait is a load error. `again`: the ranks have been a group
// before, so that one which does not answer hangs; a first load may have its reasons to be slow.
absl::Status WaitLoaded(const std::vector<std::unique_ptr<RankLink>>& links, bool again,
                        const std::function<bool()>& cancelled,
                        std::vector<v1::DescribeResponse>* described) {
  described->assign(links.size(), {});
  std::vector<bool> ready(links.size(), false);
  std::vector<int> silences(links.size(), 0);
  std::string told;
  int64_t told_us = MonotonicMicros();
  for (;;) {
    for (size_t i = 0; i < links.size(); ++i) {
      const auto answer = links[i]->Describe(kDescribeTimeoutMs);
      // Not listening yet is another error; who watches the processes tells when it died.
      silences[i] = absl::IsDeadlineExceeded(answer.status()) ? silences[i] + 1 : 0;
      (*described)[i] = answer.ok() ? *answer : v1::DescribeResponse();
      ready[i] = answer.ok() && answer->ready();
      if (answer.ok() && !answer->load_error().empty()) {
        return absl::FailedPreconditionError(
            absl::StrCat(links[i]->Name(), " could not load: ", answer->load_error()));
      }
    }
    if (std::count(ready.begin(), ready.end(), true) == static_cast<int64_t>(links.size())) {
      return absl::OkStatus();
    }
    if (cancelled()) return absl::CancelledError("forming the group was cancelled");
    const auto hung = std::find(silences.begin(), silences.end(), kMaxSilences);
    if (again && hung != silences.end()) {
      EndTheOthers(links, ready, *links[static_cast<size_t>(hung - silences.begin())]);
      silences.assign(links.size(), 0);
    } else if (const int64_t now_us = MonotonicMicros(); now_us - told_us >= kProgressEveryUs) {
      std::string progress = Progress(links, ready, *described);
      if (progress != told || now_us - told_us >= kUnchangedEveryUs) {
        spdlog::info("{}", progress);
        told = std::move(progress);
        told_us = now_us;
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(kPollMs));
  }
}

std::string NewCollectiveId(uint64_t epoch) {
  std::random_device random;
  return absl::StrFormat("kdt-%d-%d-%08x", getpid(), epoch, random());
}

// Once a rank has failed or `cancelled` says so, the others are not waited for: they would wait in vain.
absl::Status JoinAll(const std::vector<std::unique_ptr<RankLink>>& links, uint64_t epoch,
                     const std::function<bool()>& cancelled) {
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
      if (!joined.ok() && first && !gave_up) failure = RankError(*links[i], joined);
      changed.notify_all();
    });
  }
  {
    std::unique_lock lock(mutex);
    const auto settled = [&] {
      return ended == links.size() || (!failure.ok() && !absl::IsDeadlineExceeded(failure));
    };
    while (!changed.wait_for(lock, std::chrono::milliseconds(kPollMs), settled) && !cancelled()) {
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
    if (rank.kv_dtype() != first.kv_dtype()) {
      return fail(absl::StrCat("kv_dtype is ", rank.kv_dtype(), ", that of rank 0 is ", first.kv_dtype()));
    }
    if (rank.max_rows() == 0 || rank.max_sequences() == 0 || rank.kv_slots_total() == 0 ||
        rank.max_tree_nodes() == 0) {
      return fail("max_rows, max_tree_nodes, max_sequences and kv_slots_total must not be 0");
    }
  }
  return limits;
}

absl::StatusOr<FormedGroup> FormGroup(const std::vector<std::unique_ptr<RankLink>>& links,
                                      uint64_t last_epoch, const std::function<bool()>& cancelled) {
  FormedGroup formed;
  KDT_RETURN_IF_ERROR(WaitLoaded(links, last_epoch > 0, cancelled, &formed.ranks));
  KDT_ASSIGN_OR_RETURN(formed.limits, CheckDescriptions(formed.ranks));
  formed.epoch = last_epoch + 1;
  for (const auto& rank : formed.ranks) formed.epoch = std::max(formed.epoch, rank.last_epoch() + 1);
  spdlog::info("all {} ranks are loaded; joining them in epoch {}", links.size(), formed.epoch);
  KDT_RETURN_IF_ERROR(JoinAll(links, formed.epoch, cancelled));
  return formed;
}

}  // namespace kdt
