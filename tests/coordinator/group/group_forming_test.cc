// How ranks become a group, and what is done about those that cannot or do not.
#include "coordinator/group/group_forming.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <optional>
#include <thread>

#include "common/worker_note.h"
#include "tests/coordinator/group/ranks.h"

namespace kdt::testing {

TEST_CASE("a rank that cannot join is named while the others still wait for it") {
  Ranks ranks;
  for (const int rank : {0, 2, 3}) ranks.workers[rank]->fault = Fault::kJoinHangs;
  ranks.workers[1]->fault = Fault::kJoinFails;
  ranks.group->Form();
  REQUIRE(ranks.WaitState(GroupState::kDown));
  CHECK(ranks.group->reason() == "rank 1: no room to join");
  CHECK(ranks.group->Ranks()[1].last_error == "could not join: no room to join");
}

TEST_CASE("a group that is given up while its ranks join ends without waiting for them") {
  Ranks ranks;
  for (auto& worker : ranks.workers) worker->fault = Fault::kJoinHangs;
  ranks.group->Form();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  ranks.group.reset();  // hangs for the join's time limit, a minute, if it waits
}

TEST_CASE("a rank that cannot load is named with its reason") {
  Ranks ranks;
  ranks.workers[3]->description.set_ready(false);
  ranks.workers[3]->description.set_load_error("model-00002.safetensors: missing");
  ranks.group->Form();
  REQUIRE(ranks.WaitState(GroupState::kDown));
  CheckNamed(ranks, "rank 3", "model-00002.safetensors: missing");
}

TEST_CASE("why a rank could not load is told while it is missing") {
  Ranks ranks;
  const auto change = [&](const auto& changes) {
    const std::lock_guard lock(ranks.workers[3]->description_mutex);
    changes(ranks.workers[3]->description);
  };
  const auto tells = [&](const std::string& text) {
    for (int i = 0; i < 1000 && ranks.group->reason().find(text) == std::string::npos; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return ranks.group->reason().find(text) != std::string::npos;
  };
  change([](v1::DescribeResponse& rank) {
    rank.set_ready(false);
    rank.set_load_error("no room for the weights");
  });
  ranks.group->Form();
  REQUIRE(ranks.WaitState(GroupState::kDown));
  CHECK(ranks.group->Ranks()[3].last_error == "could not load: no room for the weights");
  ranks.workers[3]->Stop();  // as it does soon behind that
  ranks.group->Form();
  CHECK(tells("3 of 4 ranks are ready; waiting for rank 3 (no answer; could not load: no room for the w"));
  // What the launcher saw tells more.
  WriteLossNote(ranks.options.addresses[3], "worker 3 (pid 7) exited with status 1: no room");
  CHECK(tells("waiting for rank 3 (no answer; worker 3 (pid 7) exited with status 1: no room)"));
  CHECK(ranks.group->Ranks()[3].last_error == "worker 3 (pid 7) exited with status 1: no room");
  change([](v1::DescribeResponse& rank) {
    rank.clear_load_error();
    rank.set_total_bytes(80 << 20);
  });
  ranks.workers[3]->Restart();
  CHECK(tells("3 of 4 ranks are ready; waiting for rank 3 (0 of 80 MiB loaded)"));
  change([](v1::DescribeResponse& rank) { rank.set_ready(true); });
  REQUIRE(ranks.WaitState(GroupState::kServing));
}

TEST_CASE("when two ranks hang at once the other two are ended") {
  Ranks ranks(10000, 200);
  ranks.FormAndServe();
  REQUIRE(ranks.Step().ok());
  for (const int rank : {1, 2}) ranks.workers[rank]->fault = Fault::kSilent;
  ranks.group->Reject("it is time to form again");
  ranks.group->Form();
  const auto drained = [&](int rank) { return ranks.workers[rank]->drained.load(); };
  for (int i = 0; i < 2000 && !(drained(0) && drained(3)); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  REQUIRE(drained(0));
  REQUIRE(drained(3));
  // On a busy machine the third silence of one may be seen before that of the other.
  const std::string reason = ranks.workers[3]->drain_reason;
  CHECK((reason == "rank 1, rank 2 hang" || reason == "rank 1 hangs" || reason == "rank 2 hangs"));
  for (const int rank : {1, 2}) {
    CHECK_FALSE(drained(rank));
    CHECK_FALSE(ranks.group->Ranks()[rank].up);
    const bool named = reason.find("rank " + std::to_string(rank)) != std::string::npos;
    CHECK(ranks.group->Ranks()[rank].last_error == (named ? "it has not answered for 0 s: it hangs" : ""));
  }
  for (const int rank : {1, 2}) ranks.workers[rank]->fault = Fault::kNone;
  REQUIRE(ranks.WaitState(GroupState::kServing));
}

// A stopped process: its kernel takes connections, and nobody says a word.
struct StoppedProcess {
  explicit StoppedProcess(const std::string& address) : fd(socket(AF_UNIX, SOCK_STREAM, 0)) {
    sockaddr_un path{};
    path.sun_family = AF_UNIX;
    address.copy(path.sun_path, sizeof(path.sun_path) - 1, std::strlen("unix:"));
    unlink(path.sun_path);
    REQUIRE(bind(fd, reinterpret_cast<sockaddr*>(&path), sizeof(path)) == 0);
    REQUIRE(listen(fd, 16) == 0);
  }
  ~StoppedProcess() { close(fd); }
  const int fd;
};

TEST_CASE("a rank that hangs when a new coordinator comes is found too, not one that is slow to start") {
  Ranks ranks(10000, 200);
  const bool joined_before = GENERATE(true, false);
  for (int rank = 0; rank < kTp; ++rank)
    ranks.workers[rank]->description.set_last_epoch(joined_before ? 7 : 0);
  ranks.workers[1]->Stop();
  std::optional<StoppedProcess> stopped(std::in_place, ranks.options.addresses[1]);
  ranks.group->Form();
  // Twelve silences would take 2.4 s at least.
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(joined_before ? 20'000 : 1000);
  while (!ranks.workers[0]->drained && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(ranks.workers[0]->drained == joined_before);
  CHECK(ranks.group->Ranks()[0].up);
  CHECK_FALSE(ranks.group->Ranks()[1].up);
  stopped.reset();
  ranks.workers[1]->Restart();
  REQUIRE(ranks.WaitState(GroupState::kServing));
  CHECK(ranks.group->epoch() == (joined_before ? 8 : 1));
}

TEST_CASE("a rank that hangs between its answer and the join is found before the join's time is over") {
  Ranks ranks(10000, 200);
  for (auto& worker : ranks.workers) worker->fault = Fault::kJoinHangs;  // they wait for rank 2
  ranks.workers[2]->fault = Fault::kStopsAtJoin;
  ranks.group->Form();
  const auto drained = [&](int rank) { return ranks.workers[rank]->drained.load(); };
  for (int i = 0; i < 2000 && !(drained(0) && drained(1) && drained(3)); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  for (const int rank : {0, 1, 3}) {
    REQUIRE(drained(rank));
    CHECK(ranks.workers[rank]->drain_reason == "rank 2 hangs");
  }
  CHECK_FALSE(drained(2));
  REQUIRE(ranks.WaitState(GroupState::kDown));
  CHECK(ranks.group->reason() == "rank 2 hangs");
  CHECK(ranks.group->Ranks()[2].last_error == "it has not answered for 0 s: it hangs");
}

TEST_CASE("a rank that tells of itself and never joins is taken for one that hangs") {
  Ranks ranks;
  ranks.options.forming.join_ms = 300;
  ranks.group = std::make_unique<RankGroup>(ranks.options);
  ranks.workers[1]->fault = Fault::kJoinHangs;
  ranks.group->Form();
  REQUIRE(ranks.WaitState(GroupState::kDown));
  CHECK(ranks.group->reason() == "rank 1 hangs");
  for (const int rank : {0, 2, 3}) CHECK(ranks.workers[rank]->drained);
  CHECK_FALSE(ranks.workers[1]->drained);
}

TEST_CASE("when no other rank is ready, its launcher is told of a rank that hangs") {
  struct Case {
    bool served;
    uint64_t last_epoch;  // that ranks tell
    int silences;         // that are waited for at least: more while ranks load
  };
  const auto [served, last_epoch, silences] = GENERATE(Case{false, 0, 12},  // at the first start
                                                       Case{true, 0, 12},   // again, behind a loss
                                                       Case{false, 7, 3});  // a new coordinator
  std::atomic<int> asked{0};
  Ranks ranks(10000, 200);
  ranks.workers[3]->before_answer = [&, worker = ranks.workers[3].get()](const grpc::ServerContext&) {
    asked += worker->fault == Fault::kSilent;
  };
  if (served) ranks.FormAndServe();
  for (auto& worker : ranks.workers) {
    const std::lock_guard lock(worker->description_mutex);
    worker->description.set_ready(false);
    worker->description.set_last_epoch(last_epoch);
  }
  ranks.workers[3]->fault = Fault::kSilent;
  if (served) ranks.group->Reject("it is time to form again");
  ranks.group->Form();
  const std::string note = ranks.dir + "/rank3.hangs";
  for (int i = 0; i < 2000 && !std::filesystem::exists(note); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(std::filesystem::exists(note));
  CHECK(asked >= silences);
  for (const int rank : {0, 1, 2}) {
    CHECK_FALSE(ranks.workers[rank]->drained);
    CHECK_FALSE(std::filesystem::exists(ranks.dir + "/rank" + std::to_string(rank) + ".hangs"));
  }
  CHECK(TakeHangNote(ranks.options.addresses[3]));
}

TEST_CASE("a rank that was ready and ended before the others came is waited for again") {
  Ranks ranks;
  const auto set_ready = [&](int rank, bool ready) {
    const std::lock_guard lock(ranks.workers[rank]->description_mutex);
    ranks.workers[rank]->description.set_ready(ready);
  };
  set_ready(3, false);
  ranks.group->Form();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  ranks.workers[0]->Stop();
  set_ready(3, true);
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  CHECK(ranks.group->state() == GroupState::kJoining);
  ranks.workers[0]->Restart();
  REQUIRE(ranks.WaitState(GroupState::kServing));
  CHECK(ranks.group->epoch() == 1);
}

}  // namespace kdt::testing
