// The group over real unix sockets: steps, and each way in which a rank can fail in them.
#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>

#include "tests/coordinator/group/ranks.h"

namespace kdt::testing {

TEST_CASE("ranks form a group, take steps and tell of themselves") {
  Ranks ranks;
  ranks.workers[2]->description.set_ready(false);
  ranks.group->Form();
  std::this_thread::sleep_for(std::chrono::milliseconds(120));
  CHECK(ranks.group->state() == GroupState::kJoining);  // one is loading
  {
    const std::lock_guard lock(ranks.workers[2]->description_mutex);
    ranks.workers[2]->description.set_ready(true);
  }
  REQUIRE(ranks.WaitState(GroupState::kServing));
  CHECK(ranks.group->epoch() == 1);
  CHECK(ranks.group->limits().kv_slots == 4096);
  for (int i = 0; i < 200; ++i) REQUIRE(ranks.Step().ok());
  CHECK(ranks.group->last_cost().round_trip_us > 0);
  REQUIRE(ranks.group->Poll().ok());
  for (const RankStatus& rank : ranks.group->Ranks()) {
    CHECK(rank.up);
    CHECK(rank.steps >= 199);
    CHECK(rank.kv_slots_used >= 201);
  }
  ranks.group->DrainWorkers();
  for (const auto& worker : ranks.workers) CHECK(worker->drained);
}

// Each rank's answer waits until all have been asked: who asks one behind the other gets none in time.
TEST_CASE("ranks are asked, and ended, at the same time") {
  std::mutex mutex;
  std::condition_variable came;
  std::set<int> asked;
  Ranks ranks;
  for (int rank = 0; rank < kTp; ++rank) {
    ranks.workers[rank]->before_answer = [&, rank](const grpc::ServerContext& context) {
      std::unique_lock lock(mutex);
      asked.insert(rank);
      came.notify_all();
      while (asked.size() < kTp && !context.IsCancelled()) came.wait_for(lock, std::chrono::milliseconds(5));
    };
  }
  ranks.FormAndServe();
  {
    const std::lock_guard lock(mutex);
    asked.clear();
  }
  ranks.group->DrainWorkers();
  for (const auto& worker : ranks.workers) CHECK(worker->drained);
}

TEST_CASE("ranks that listen are ended also when the group has not formed") {
  Ranks ranks;
  ranks.workers[2]->Stop();
  ranks.group->Form();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  ranks.group->DrainWorkers();
  CHECK(ranks.group->state() == GroupState::kDown);
  for (const int rank : {0, 1, 3}) CHECK(ranks.workers[rank]->drained);
}

TEST_CASE("a group that is given up does not wait for a rank that hangs in a step") {
  Ranks ranks(600'000);
  ranks.FormAndServe();
  REQUIRE(ranks.Step().ok());
  for (const int rank : {0, 2}) ranks.workers[rank]->fault = Fault::kHang;
  std::thread gives_up([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    ranks.group->Abandon();
  });
  CHECK_FALSE(ranks.Step().ok());  // hangs for the step's time-out, ten minutes, if it waits
  gives_up.join();
  CHECK(ranks.group->state() == GroupState::kDown);
  ranks.group->DrainWorkers();
  for (const auto& worker : ranks.workers) CHECK(worker->drained);
}

TEST_CASE("ranks that are gone are known, and told from those that load") {
  Ranks ranks;
  ranks.FormAndServe();
  REQUIRE(ranks.Step().ok());
  CHECK(ranks.group->MayServeSoon());
  const auto change = [&](int rank, bool ready) {
    const std::lock_guard lock(ranks.workers[rank]->description_mutex);
    ranks.workers[rank]->description.set_ready(ready);
  };
  for (int rank = 0; rank < kTp; ++rank) change(rank, false);
  ranks.group->Reject("it is time to form again");
  CHECK(ranks.group->MayServeSoon());  // nobody has been asked yet
  ranks.group->Form();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  CHECK(ranks.group->MayServeSoon());
  const auto becomes = [&](bool may) {
    for (int i = 0; i < 1000 && ranks.group->MayServeSoon() != may; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return ranks.group->MayServeSoon() == may;
  };
  ranks.workers[1]->Stop();
  CHECK(becomes(false));
  ranks.workers[1]->Restart();
  CHECK(becomes(true));
  {
    const std::lock_guard lock(ranks.workers[2]->description_mutex);
    ranks.workers[2]->description.set_load_error("no room for the weights");
  }
  CHECK(becomes(false));
  ranks.WaitState(GroupState::kDown);
}

TEST_CASE("a diverging rank is named before any token of the next step") {
  Ranks ranks;
  ranks.FormAndServe();
  for (int i = 0; i < 3; ++i) REQUIRE(ranks.Step().ok());
  ranks.workers[2]->fault = Fault::kDigest;
  // The diverging step itself may come through, the one behind it may not.
  if (ranks.Step().ok()) CHECK_FALSE(ranks.Step().ok());
  CheckNamed(ranks, "rank 2", "digests differ");
  for (const RankStatus& rank : ranks.group->Ranks()) CHECK(rank.up == (rank.rank != 2));
}

TEST_CASE("a divergence shows also when no step follows") {
  Ranks ranks;
  ranks.FormAndServe();
  ranks.workers[1]->fault = Fault::kDigest;
  absl::Status status = ranks.Step();
  for (int i = 0; i < 1000 && status.ok(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    status = ranks.group->Poll();
  }
  CheckNamed(ranks, "rank 1", "digests differ");
}

TEST_CASE("a dead rank is named at once, also while idle") {
  Ranks ranks;
  ranks.FormAndServe();
  REQUIRE(ranks.Step().ok());
  SECTION("in a step, while the others wait for it") {
    for (const int rank : {0, 1, 2}) ranks.workers[rank]->fault = Fault::kHang;
    ranks.workers[3]->fault = Fault::kEndsStream;
    CHECK_FALSE(ranks.Step().ok());
  }
  SECTION("idle") {
    ranks.workers[3]->Stop();
    absl::Status status;
    for (int i = 0; i < 1000 && status.ok(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      status = ranks.group->Poll();
    }
    CHECK_FALSE(status.ok());
  }
  CheckNamed(ranks, "rank 3", "stream ended");
}

TEST_CASE("a late rank is named, not those that waited for it") {
  Ranks ranks(1500);
  ranks.FormAndServe();
  REQUIRE(ranks.Step().ok());
  for (const int rank : {0, 1, 3}) ranks.workers[rank]->fault = Fault::kWaits;
  ranks.workers[2]->fault = Fault::kHang;
  CHECK_FALSE(ranks.Step().ok());
  CheckNamed(ranks, "rank 2", "");
}

TEST_CASE("a rank that errs is named with its error") {
  Ranks ranks(1500);
  ranks.FormAndServe();
  REQUIRE(ranks.Step().ok());
  for (const int rank : {0, 2, 3}) ranks.workers[rank]->fault = Fault::kWaits;
  ranks.workers[1]->fault = Fault::kFails;
  CHECK_FALSE(ranks.Step().ok());
  CheckNamed(ranks, "rank 1", "the device is broken");
}

TEST_CASE("a lost group forms again in a later epoch") {
  Ranks ranks;
  ranks.FormAndServe();
  REQUIRE(ranks.Step().ok());
  ranks.workers[3]->fault = Fault::kEndsStream;
  // Rank 0 does not wait for the others here, so one step may still come through.
  if (ranks.Step().ok()) CHECK_FALSE(ranks.Step().ok());
  ranks.workers[3]->Stop();
  ranks.group->Form();
  ranks.workers[3]->fault = Fault::kNone;
  ranks.workers[3]->Restart();
  REQUIRE(ranks.WaitState(GroupState::kServing));
  CHECK(ranks.group->epoch() == 2);
  ranks.position = 0;
  for (int i = 0; i < 5; ++i) CHECK(ranks.Step().ok());
}

}  // namespace kdt::testing
