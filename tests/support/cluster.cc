#include "tests/support/cluster.h"

#include <filesystem>
#include <utility>

#include "tests/support/catch.h"

namespace kdt::testing {

Cluster::Cluster(const ClusterOptions& options) {
  ServedGroupOptions served;
  served.bin_dir = KDT_BIN_DIR;
  served.model = options.model;
  served.drafter = options.drafter;
  served.tp = options.tp;
  served.flags = options.flags;
  auto group = ServedGroup::Start(served);
  if (!group.ok()) FAIL(group.status().message());
  group_ = *std::move(group);
}

grpc::Status Generate(v1::Generation::Stub& stub, const v1::GenerateRequest& request,
                      std::vector<Sample>* samples) {
  samples->assign(request.sampling().has_n() ? request.sampling().n() : 1, Sample());
  grpc::ClientContext context;
  auto reader = stub.Generate(&context, request);
  v1::GenerateResponse response;
  while (reader->Read(&response)) {
    if (response.index() >= samples->size()) {
      samples->resize(response.index() + 1);
    }
    Sample& sample = (*samples)[response.index()];
    if (response.has_complete()) {
      CHECK_FALSE(sample.complete.has_value());  // exactly one
      sample.complete = response.complete();
      continue;
    }
    CHECK_FALSE(sample.complete.has_value());  // nothing behind it
    const v1::Chunk& chunk = response.chunk();
    sample.tokens.insert(sample.tokens.end(), chunk.token_ids().begin(), chunk.token_ids().end());
    sample.text += chunk.text();
    sample.reasoning += chunk.reasoning_text();
    sample.logprobs.insert(sample.logprobs.end(), chunk.logprobs().begin(), chunk.logprobs().end());
  }
  return reader->Finish();
}

std::vector<std::string> SharedMemoryNames() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename().string();
    if (name.rfind("kdt", 0) == 0) names.push_back(name);
  }
  return names;
}

std::string GoldenModel() { return std::string(KDT_GOLDENS_DIR) + "/model"; }
std::string GoldenDrafter() { return std::string(KDT_GOLDENS_DIR) + "/drafter"; }
std::string ShippedModel() { return std::string(KDT_SOURCE_DIR) + "/deploy/models/kimi-tiny"; }
std::string ShippedDrafter() { return ShippedModel() + "/drafter"; }

}  // namespace kdt::testing
