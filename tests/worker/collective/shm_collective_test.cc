#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <random>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "tests/support/catch.h"
#include "worker/collective/collective.h"

namespace kdt {
namespace {

std::string FreshId(const char* name) {
  static int counter = 0;
  return std::string("test-") + name + "-" + std::to_string(getpid()) + "-" + std::to_string(++counter);
}

bool NameExists(const std::string& id) { return std::filesystem::exists("/dev/shm/kdt-" + id); }

// Runs `body(collective, rank)` on `size` threads that form one group.
template <typename Body>
void RunRanks(const char* name, int size, size_t buffer_bytes, Body body) {
  const std::string id = FreshId(name);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      auto collective = MakeShmCollective(id, rank, size, buffer_bytes, absl::Seconds(20));
      if (!collective.ok()) throw std::runtime_error(std::string(collective.status().message()));
      (*collective)->SetDeadline(absl::Now() + absl::Seconds(20));
      body(**collective, rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_FALSE(NameExists(id));
}

std::vector<float> Values(int rank, int64_t count, uint32_t salt) {
  std::mt19937 random(static_cast<uint32_t>(rank) * 7919 + salt);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

}  // namespace

TEST_CASE("all-reduce sums in rank order with the same bits on every rank, in one or many pieces") {
  for (const int size : {1, 2, 3, 8}) {
    for (const int64_t count : {1, 5, 256, 1000, 20000, 70001}) {
      DYNAMIC_SECTION(size << " ranks, " << count << " values") {
        std::vector<float> expected(static_cast<size_t>(count));
        for (int rank = 0; rank < size; ++rank) {
          const std::vector<float> values = Values(rank, count, 1);
          for (size_t i = 0; i < values.size(); ++i)
            expected[i] = rank == 0 ? values[i] : expected[i] + values[i];
        }
        std::vector<std::vector<float>> results(static_cast<size_t>(size));
        RunRanks("reduce", size, 1 << 16, [&](Collective& collective, int rank) {
          for (int repeat = 0; repeat < 3; ++repeat) {
            std::vector<float> values = Values(rank, count, 1);
            const auto status =
                collective.AllReduceSum(kernels::MakeTensor(values.data(), kernels::DType::kF32, 1, count));
            if (status.ok()) results[static_cast<size_t>(rank)] = values;
          }
        });
        for (const auto& result : results) {
          REQUIRE(result.size() == expected.size());
          CHECK(std::memcmp(result.data(), expected.data(), expected.size() * sizeof(float)) == 0);
        }
      }
    }
  }
}

TEST_CASE("bf16 sums are rounded once, from float32") {
  std::vector<std::vector<uint16_t>> results(3);
  RunRanks("bf16", 3, 1 << 16, [&](Collective& collective, int rank) {
    // 256, 1, 1: bf16 steps at 256 are 2, so adding in bf16 would lose both ones; float32 keeps them: 258.
    std::vector<uint16_t> values = {static_cast<uint16_t>(rank == 0 ? 0x4380 : 0x3f80), 0x7fc0};
    if (collective.AllReduceSum(kernels::MakeTensor(values.data(), kernels::DType::kBF16, 1, 2)).ok()) {
      results[static_cast<size_t>(rank)] = values;
    }
  });
  for (const auto& result : results) {
    REQUIRE(result.size() == 2);
    CHECK(result[0] == 0x4381);
    CHECK((result[1] & 0x7fff) > 0x7f80);  // NaN stays NaN
  }
}

TEST_CASE("all-gather puts every rank's bytes in rank order") {
  const size_t bytes = 150000;  // more than two buffers
  std::vector<int> good(4, 0);
  RunRanks("gather", 4, 1 << 16, [&](Collective& collective, int rank) {
    std::vector<char> in(bytes, static_cast<char>('a' + rank));
    std::vector<char> out(4 * bytes);
    if (!collective.AllGather(in.data(), bytes, out.data()).ok()) return;
    bool same = true;
    for (size_t i = 0; i < out.size(); ++i) same = same && out[i] == static_cast<char>('a' + i / bytes);
    good[static_cast<size_t>(rank)] = same ? 1 : 0;
  });
  CHECK(good == std::vector<int>{1, 1, 1, 1});
}

TEST_CASE("broadcast gives every rank the root's bytes, in one or many pieces") {
  for (const size_t bytes : {size_t{1}, size_t{150001}}) {
    for (const int root : {0, 2}) {
      std::vector<int> good(3, 0);
      RunRanks("broadcast", 3, 1 << 16, [&](Collective& collective, int rank) {
        std::vector<char> data(bytes, static_cast<char>('a' + rank));
        if (!collective.Broadcast(data.data(), bytes, root).ok()) return;
        good[static_cast<size_t>(rank)] =
            data == std::vector<char>(bytes, static_cast<char>('a' + root)) ? 1 : 0;
      });
      CHECK(good == std::vector<int>{1, 1, 1});
    }
  }
}

TEST_CASE("the test of a new group passes on every rank") {
  std::vector<absl::Status> statuses(3, absl::InternalError("not run"));
  RunRanks("probe", 3, 1 << 16, [&](Collective& collective, int rank) {
    statuses[static_cast<size_t>(rank)] = collective.Probe();
  });
  for (const absl::Status& status : statuses) CHECK(status.ok());
}

TEST_CASE("a rank that does not come is named after the deadline, and the others are woken") {
  std::vector<absl::Status> statuses(3);
  RunRanks("late", 3, 1 << 16, [&](Collective& collective, int rank) {
    if (rank == 1) {
      absl::SleepFor(absl::Milliseconds(700));
    } else {
      collective.SetDeadline(absl::Now() + absl::Milliseconds(rank == 0 ? 100 : 10000));
    }
    float value = 1;
    statuses[static_cast<size_t>(rank)] =
        collective.AllReduceSum(kernels::MakeTensor(&value, kernels::DType::kF32, 1, 1));
  });
  CHECK(statuses[0].code() == absl::StatusCode::kDeadlineExceeded);
  CHECK(statuses[0].message().find("rank 1") != absl::string_view::npos);
  CHECK(statuses[0].message().find("rank 2") == absl::string_view::npos);
  // The same reason everywhere, and long before rank 2's own deadline.
  CHECK(statuses[1] == statuses[0]);
  CHECK(statuses[2] == statuses[0]);
}

TEST_CASE("abort by one rank ends the operation on all") {
  std::vector<absl::Status> statuses(3);
  RunRanks("abort", 3, 1 << 16, [&](Collective& collective, int rank) {
    if (rank == 1) {
      absl::SleepFor(absl::Milliseconds(50));
      collective.Abort();
    }
    float value = 1;
    statuses[static_cast<size_t>(rank)] =
        collective.AllReduceSum(kernels::MakeTensor(&value, kernels::DType::kF32, 1, 1));
  });
  for (const absl::Status& status : statuses) CHECK(status.code() == absl::StatusCode::kCancelled);
  CHECK(statuses[0].message().find("rank 1") != absl::string_view::npos);
}

TEST_CASE("a group that is not complete in time fails with the missing ranks and leaves no name behind") {
  const std::string id = FreshId("incomplete");
  absl::Status first, second;
  std::thread other([&] { second = MakeShmCollective(id, 2, 4, 1 << 16, absl::Milliseconds(300)).status(); });
  first = MakeShmCollective(id, 0, 4, 1 << 16, absl::Milliseconds(300)).status();
  other.join();
  CHECK_FALSE(first.ok());
  CHECK_FALSE(second.ok());
  const std::string text = std::string(first.message()) + std::string(second.message());
  CHECK(text.find("rank 1, rank 3") != std::string::npos);
  CHECK_FALSE(NameExists(id));
}

TEST_CASE("bad names and ranks are refused") {
  CHECK_FALSE(MakeShmCollective("../x", 0, 2, 1 << 16, absl::Milliseconds(10)).ok());
  CHECK_FALSE(MakeShmCollective("", 0, 2, 1 << 16, absl::Milliseconds(10)).ok());
  CHECK_FALSE(MakeShmCollective("x", 2, 2, 1 << 16, absl::Milliseconds(10)).ok());
  CHECK_FALSE(MakeShmCollective("x", 0, 65, 1 << 16, absl::Milliseconds(10)).ok());
}

TEST_CASE("the next group removes what a killed one left behind, and nothing else") {
  const std::string dead = FreshId("dead"), young = FreshId("young"), alive = FreshId("alive");
  const auto kill_while_joining = [](const std::string& id) {
    const pid_t child = fork();
    if (child == 0) {
      (void)MakeShmCollective(id, 0, 2, 1 << 16, absl::Seconds(60));
      _exit(0);
    }
    while (!NameExists(id)) absl::SleepFor(absl::Milliseconds(2));
    absl::SleepFor(absl::Milliseconds(20));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  };
  kill_while_joining(dead);
  kill_while_joining(young);
  std::atomic<bool> stop{false};
  std::thread waiting([&] { (void)MakeShmCollective(alive, 0, 2, 1 << 16, absl::Seconds(60), &stop); });
  while (!NameExists(alive)) absl::SleepFor(absl::Milliseconds(2));
  absl::SleepFor(absl::Milliseconds(20));
  const auto minute_ago = std::filesystem::file_time_type::clock::now() - std::chrono::minutes(1);
  for (const std::string& id : {dead, alive})
    std::filesystem::last_write_time("/dev/shm/kdt-" + id, minute_ago);

  RunRanks("next", 2, 1 << 16, [](Collective&, int) {});
  CHECK_FALSE(NameExists(dead));
  CHECK(NameExists(young));
  CHECK(NameExists(alive));
  stop = true;
  waiting.join();
  std::filesystem::remove("/dev/shm/kdt-" + young);
}

TEST_CASE("joining can be cancelled") {
  std::atomic<bool> cancelled{false};
  std::vector<absl::Status> statuses(2);
  std::vector<std::thread> threads;
  for (const int rank : {0, 2}) {
    threads.emplace_back([&, rank, id = rank == 0 ? FreshId("cancel") : FreshId("nobody")] {
      statuses[rank / 2] = MakeShmCollective(id, rank, 3, 1 << 16, absl::Seconds(60), &cancelled).status();
      if (NameExists(id)) statuses[rank / 2] = absl::InternalError("name left behind");
    });
  }
  absl::SleepFor(absl::Milliseconds(50));
  cancelled = true;
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) CHECK(status.code() == absl::StatusCode::kCancelled);
}

TEST_CASE("a rank cannot join twice, a used name is refused") {
  const std::string id = FreshId("twice");
  absl::Status zero, one, again, reused;
  std::atomic<bool> stop{false};
  std::thread first([&] { zero = MakeShmCollective(id, 0, 3, 1 << 16, absl::Seconds(60), &stop).status(); });
  std::thread second([&] { one = MakeShmCollective(id, 1, 3, 1 << 16, absl::Seconds(60), &stop).status(); });
  absl::SleepFor(absl::Milliseconds(100));
  again = MakeShmCollective(id, 1, 3, 1 << 16, absl::Milliseconds(500)).status();
  reused = MakeShmCollective(id, 0, 3, 1 << 16, absl::Milliseconds(500)).status();
  CHECK(NameExists(id));  // the group goes on waiting for rank 2
  stop = true;
  first.join();
  second.join();
  CHECK(again.code() == absl::StatusCode::kAlreadyExists);
  CHECK(reused.code() == absl::StatusCode::kAlreadyExists);
  CHECK_FALSE(zero.ok());
  CHECK_FALSE(one.ok());
  CHECK_FALSE(NameExists(id));
}

TEST_CASE("a process killed in the middle is named long before the deadline") {
  constexpr int kSize = 4;
  const std::string id = FreshId("killed");
  pid_t children[kSize] = {};
  const auto reduce_until_error = [](Collective& collective) {
    while (true) {
      std::vector<float> values(20000, 1.0f);
      const absl::Status status =
          collective.AllReduceSum(kernels::MakeTensor(values.data(), kernels::DType::kF32, 1, 20000));
      if (!status.ok()) return status;
    }
  };
  for (int rank = 1; rank < kSize; ++rank) {
    children[rank] = fork();
    if (children[rank] != 0) continue;
    auto collective = MakeShmCollective(id, rank, kSize, 1 << 16, absl::Seconds(20));
    if (!collective.ok()) _exit(1);
    (*collective)->SetDeadline(absl::Now() + absl::Seconds(60));
    _exit(reduce_until_error(**collective).code() == absl::StatusCode::kUnavailable ? 0 : 2);
  }
  auto collective = MakeShmCollective(id, 0, kSize, 1 << 16, absl::Seconds(20));
  REQUIRE(collective.ok());
  CHECK_FALSE(NameExists(id));
  (*collective)->SetDeadline(absl::Now() + absl::Seconds(60));
  std::thread killer([&] {
    absl::SleepFor(absl::Milliseconds(100));
    kill(children[2], SIGKILL);
  });
  const absl::Status status = reduce_until_error(**collective);
  killer.join();
  CHECK(status.code() == absl::StatusCode::kUnavailable);
  CHECK(status.message().find("rank 2 (process " + std::to_string(children[2])) != absl::string_view::npos);
  for (int rank = 1; rank < kSize; ++rank) {
    int result = 0;
    REQUIRE(waitpid(children[rank], &result, 0) == children[rank]);
    if (rank == 2) {
      CHECK(WIFSIGNALED(result));
    } else {
      CHECK(WIFEXITED(result));
      CHECK(WEXITSTATUS(result) == 0);
    }
  }
}

}  // namespace kdt
