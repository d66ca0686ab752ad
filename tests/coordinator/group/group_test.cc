// The group over real unix sockets: forming, steps, and each way in which a rank can fail.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "common/process.h"
#include "common/worker_note.h"
#include "coordinator/group/group_forming.h"
#include "coordinator/group/rank_group.h"
#include "tests/coordinator/group/fake_worker.h"
#include "tests/support/catch.h"

namespace kdt::testing {
namespace {

constexpr int kTp = 4;

struct Ranks {
  explicit Ranks(int step_timeout_ms = 10000, int describe_timeout_ms = 5000)
      : dir(*MakeTempDir("kdt-test-")) {
    for (int rank = 0; rank < kTp; ++rank) {
      const std::string address = "unix:" + dir + "/rank" + std::to_string(rank);
      options.addresses.push_back(address);
      workers.push_back(std::make_unique<FakeWorker>(address, rank, kTp));
    }
    options.step_timeout_ms = step_timeout_ms;
    options.forming.describe_ms = describe_timeout_ms;
    group = std::make_unique<RankGroup>(options);
  }
  ~Ranks() {
    group.reset();
    workers.clear();
    RemoveTree(dir);
  }

  bool WaitState(GroupState state) {
    for (int i = 0; i < 2000 && group->state() != state; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return group->state() == state;
  }
  void FormAndServe() {
    group->Form();
    REQUIRE(WaitState(GroupState::kServing));
  }
  // Steps of one sequence: a prompt, then roots.
  absl::Status Step() {
    v1::StepRequest request;
    if (position == 0) {
      request.add_ops()->mutable_create()->set_sequence_id(1);
      auto* chunk = request.add_prefill();
      chunk->set_sequence_id(1);
      chunk->set_sample(true);
      for (uint32_t id = 1; id <= 3; ++id) chunk->add_tokens(id);
    } else {
      auto* tree = request.add_verify();
      tree->set_sequence_id(1);
      tree->set_start(position);
      tree->add_tokens(root);
    }
    absl::Status status = group->Send(&request);
    if (status.ok()) status = group->Receive(&answer);
    if (!status.ok()) return status;
    position += position == 0 ? 3 : 1;
    root = answer.results(0).tokens(0);
    return status;
  }

  std::string dir;
  RankGroupOptions options;
  std::vector<std::unique_ptr<FakeWorker>> workers;
  std::unique_ptr<RankGroup> group;
  v1::StepResponse answer;
  uint32_t position = 0;
  uint32_t root = 0;
};

void CheckNamed(const Ranks& ranks, const std::string& rank, const std::string& what) {
  INFO(ranks.group->reason());
  CHECK(ranks.group->state() == GroupState::kDown);
  CHECK(ranks.group->reason().rfind(rank + " ", 0) == 0);
  CHECK(ranks.group->reason().find(what) != std::string::npos);
}

}  // namespace

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
  for (int i = 0; i < (joined_before ? 2000 : 300) && !ranks.workers[0]->drained; ++i)
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
  Ranks ranks(10000, 200);
  const bool joined_before = GENERATE(true, false);
  for (auto& worker : ranks.workers) {
    worker->description.set_ready(false);
    worker->description.set_last_epoch(joined_before ? 7 : 0);
  }
  ranks.workers[3]->fault = Fault::kSilent;
  ranks.group->Form();
  // Before any epoch it is waited for longer: twelve silences instead of three.
  const std::string note = ranks.dir + "/rank3.hangs";
  for (int i = 0; i < 2000 && !std::filesystem::exists(note); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(std::filesystem::exists(note));
  for (const int rank : {0, 1, 2}) {
    CHECK_FALSE(ranks.workers[rank]->drained);
    CHECK_FALSE(std::filesystem::exists(ranks.dir + "/rank" + std::to_string(rank) + ".hangs"));
  }
  CHECK(TakeHangNote(ranks.options.addresses[3]));
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

TEST_CASE("lines that come again and again, also in turn, are each told once in ten seconds") {
  SeldomLine line;
  CHECK(line.Due("a", 1));
  CHECK_FALSE(line.Due("a", 9'000'000));
  CHECK(line.Due("b", 9'000'001));
  CHECK_FALSE(line.Due("a", 9'000'002));
  CHECK(line.TakeUntold() == 2);
  CHECK(line.TakeUntold() == 0);
  CHECK(line.Due("a", 10'000'001));
  CHECK_FALSE(line.Due("b", 19'000'000));
  CHECK(line.Due("b", 19'000'001));
  SeldomLine slow(2'000'000);
  CHECK(slow.Due("1 of 9", 1));
  CHECK_FALSE(slow.Due("2 of 9", 1'000'000));
  CHECK(slow.Due("3 of 9", 2'000'001));
  slow.Forget();
  CHECK(slow.Due("3 of 9", 2'000'002));
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

TEST_CASE("ranks that do not belong together are refused") {
  std::vector<v1::DescribeResponse> described(2);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    described[rank].set_rank(rank);
    described[rank].set_tp(2);
    described[rank].set_kv_slots_total(100);
    described[rank].set_max_rows(64);
    described[rank].set_max_sequences(8);
    described[rank].set_max_tree_nodes(65);
    described[rank].set_backend("cuda");
    described[rank].set_device("NVIDIA RTX PRO 6000");
    described[rank].set_arch("sm_120");
  }
  REQUIRE(CheckDescriptions(described).ok());
  const auto refused = [&](const std::string& what) {
    const absl::Status status = CheckDescriptions(described).status();
    INFO(status.message());
    return !status.ok() && std::string(status.message()).find("rank 1: ") == 0 &&
           std::string(status.message()).find(what) != std::string::npos;
  };
  SECTION("checkpoint") {
    described[1].set_checkpoint_digest("other");
    CHECK(refused("checkpoint_digest"));
  }
  SECTION("rank") {
    described[1].set_rank(0);
    CHECK(refused("is rank 0"));
  }
  SECTION("tp") {
    described[1].set_tp(4);
    CHECK(refused("tp 4"));
  }
  SECTION("slots") {
    described[1].set_kv_slots_total(90);
    CHECK(refused("kv_slots_total"));
  }
  SECTION("kv_dtype") {
    described[1].set_kv_dtype("bf16");
    CHECK(refused("kv_dtype"));
  }
  SECTION("backend") {
    described[1].set_backend("cpu");
    CHECK(refused("backend is cpu, that of rank 0 is cuda"));
  }
  SECTION("GPU") {
    described[1].set_device("NVIDIA H200");
    CHECK(refused("its GPU is NVIDIA H200, that of rank 0 is NVIDIA RTX PRO 6000"));
  }
  SECTION("architecture") {
    described[1].set_arch("sm_90");
    CHECK(refused("sm_90"));
  }
  SECTION("CPUs may differ") {
    for (auto& rank : described) rank.set_backend("cpu");
    described[1].set_device("another processor");
    CHECK(CheckDescriptions(described).ok());
  }
  SECTION("rows") {
    described[1].set_max_rows(32);
    CHECK(refused("max_rows"));
  }
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
