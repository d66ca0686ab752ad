// A worker dies while requests run and the launcher restarts the group: the streams go on, and the tokens are
// those of a run that nothing disturbed.
#include <signal.h>

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/cluster.h"
#include "tests/support/requests.h"

namespace kdt::testing {
namespace {

v1::GenerateRequest Request(uint32_t first, uint32_t max_tokens) {
  v1::GenerateRequest request = RequestFor({first, 80, 91, 337, 269}, max_tokens);
  request.mutable_sampling()->set_temperature(0.8F);
  request.mutable_sampling()->set_seed(first);
  request.mutable_output()->set_logprobs(1);
  return request;
}

// Streams run, `disturb` is done to the group, and every stream goes on as if nothing had been.
void CheckStreamsOutlive(int tp, std::vector<std::string> flags, uint32_t requests, uint32_t tokens,
                         const std::function<void(Cluster&)>& disturb) {
  Cluster cluster({GoldenModel(), GoldenDrafter(), tp, std::move(flags)});
  std::vector<std::vector<Sample>> disturbed(requests);
  std::vector<grpc::Status> statuses(requests);
  std::atomic<uint64_t> seen{0};
  std::vector<std::thread> clients;
  for (uint32_t i = 0; i < requests; ++i) {
    clients.emplace_back([&, i] {
      grpc::ClientContext context;
      auto reader = cluster.stub().Generate(&context, Request(700 + i, tokens));
      v1::GenerateResponse response;
      disturbed[i].resize(1);
      while (reader->Read(&response)) {
        const v1::Chunk& chunk = response.chunk();
        disturbed[i][0].tokens.insert(disturbed[i][0].tokens.end(), chunk.token_ids().begin(),
                                      chunk.token_ids().end());
        disturbed[i][0].logprobs.insert(disturbed[i][0].logprobs.end(), chunk.logprobs().begin(),
                                        chunk.logprobs().end());
        seen += static_cast<uint64_t>(chunk.token_ids_size());
      }
      statuses[i] = reader->Finish();
    });
  }
  while (seen < 300) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  disturb(cluster);
  for (std::thread& client : clients) client.join();

  v1::ClusterInfo info;
  grpc::ClientContext context;
  REQUIRE(cluster.stub().GetClusterInfo(&context, {}, &info).ok());
  INFO(cluster.Log());
  CHECK(info.epoch() == 2);
  for (uint32_t i = 0; i < requests; ++i) {
    REQUIRE(statuses[i].ok());
    std::vector<Sample> whole;
    REQUIRE(Generate(cluster.stub(), Request(700 + i, tokens), &whole).ok());
    CHECK(disturbed[i][0].tokens == whole[0].tokens);
    REQUIRE(disturbed[i][0].logprobs.size() == whole[0].logprobs.size());
    for (size_t t = 0; t < whole[0].logprobs.size(); ++t) {
      CHECK(disturbed[i][0].logprobs[t].SerializeAsString() == whole[0].logprobs[t].SerializeAsString());
    }
  }
}

}  // namespace

TEST_CASE("after a restart of the group every stream goes on without a repeated or missing token") {
  CheckStreamsOutlive(2, {"--on_loss=restart", "--budget=7"}, 3, 1500,
                      [](Cluster& cluster) { REQUIRE(kill(cluster.WorkerPids().at(1), SIGKILL) == 0); });
}

TEST_CASE("a rank that hangs is ended with the others, and the streams go on") {
  CheckStreamsOutlive(2, {"--on_loss=restart", "--budget=7", "--step_timeout_ms=2000"}, 2, 1500,
                      [](Cluster& cluster) { REQUIRE(kill(cluster.WorkerPids().at(0), SIGSTOP) == 0); });
}

TEST_CASE("the only rank of a group hangs: the launcher kills it, and the streams go on") {
  CheckStreamsOutlive(1, {"--on_loss=restart", "--budget=7", "--step_timeout_ms=2000"}, 1, 700,
                      [](Cluster& cluster) {
                        const pid_t worker = cluster.WorkerPids().at(0);
                        REQUIRE(kill(worker, SIGSTOP) == 0);
                        const std::string line = "worker 0 (pid " + std::to_string(worker) +
                                                 ") was killed by signal 9 (Killed): it hung; restarting";
                        for (int i = 0; i < 8000 && cluster.Log().find(line) == std::string::npos; ++i)
                          std::this_thread::sleep_for(std::chrono::milliseconds(5));
                        INFO(cluster.Log());
                        CHECK(cluster.Log().find(line) != std::string::npos);
                      });
}

}  // namespace kdt::testing
