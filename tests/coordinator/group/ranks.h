// Four fake workers on unix sockets and the group that they make.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/process.h"
#include "coordinator/group/rank_group.h"
#include "tests/coordinator/group/fake_worker.h"
#include "tests/support/catch.h"

namespace kdt::testing {

inline constexpr int kTp = 4;

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

inline void CheckNamed(const Ranks& ranks, const std::string& rank, const std::string& what) {
  INFO(ranks.group->reason());
  CHECK(ranks.group->state() == GroupState::kDown);
  CHECK(ranks.group->reason().rfind(rank + " ", 0) == 0);
  CHECK(ranks.group->reason().find(what) != std::string::npos);
}

}  // namespace kdt::testing
