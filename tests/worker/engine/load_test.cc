// Loading: what a rank holds, progress, and checkpoints that do not fit.
#include <filesystem>

#include "common/status.h"
#include "tests/support/catch.h"
#include "tests/worker/support/checkpoint_copy.h"
#include "tests/worker/support/engine_group.h"

namespace kdt::testing {
namespace {

absl::Status LoadStatus(const EngineOptions& options) {
  auto backend = kernels::MakeCpuBackend(1);
  REQUIRE(backend.ok());
  return Engine::Load(options, backend->get(), nullptr).status();
}

void CheckNames(const absl::Status& status, const std::string& named) {
  CAPTURE(std::string(status.message()));
  CHECK(!status.ok());
  CHECK(std::string(status.message()).find(named) != std::string::npos);
}

// Bytes that one rank of `tp` says it loads.
uint64_t ShardBytes(int tp, int rank) {
  EngineOptions options = GoldenOptions(true);
  options.tp = tp;
  options.rank = rank;
  auto backend = kernels::MakeCpuBackend(1);
  uint64_t last = 0;
  uint64_t total = 0;
  const auto engine = Engine::Load(options, backend->get(), [&](uint64_t loaded, uint64_t all) {
    CHECK(loaded > last);
    last = loaded;
    total = all;
  });
  REQUIRE(engine.ok());
  CHECK(last == total);
  return total;
}

}  // namespace

TEST_CASE("a rank loads its own slices and says how far it is") {
  const uint64_t whole = ShardBytes(1, 0);
  const uint64_t half = ShardBytes(2, 1);
  const uint64_t eighth = ShardBytes(8, 5);
  CHECK(half == ShardBytes(2, 0));
  CHECK(half < whole);
  CHECK(eighth < half);
  // What is replicated (norms, q_a, kv_a, router) is on both halves.
  CHECK(2 * half - whole < whole / 4);
}

TEST_CASE("what does not fit is refused by name") {
  EngineOptions options = GoldenOptions(true);
  SECTION("a group size that is none") {
    options.tp = 3;
    CheckNames(LoadStatus(options), "tp must be");
  }
  SECTION("a rank outside the group") {
    options.rank = 1;
    CheckNames(LoadStatus(options), "rank");
  }
  SECTION("a context longer than the model's") {
    options.max_context = 1 << 20;
    CheckNames(LoadStatus(options), "max_context");
  }
  SECTION("a tree larger than the kernels know") {
    options.max_tree_nodes = 257;
    CheckNames(LoadStatus(options), "max_tree_nodes");
  }
  SECTION("no memory for a slot") {
    options.kv_slots = 0;
    options.kv_bytes = 1000;
    CheckNames(LoadStatus(options), "kv_bytes");
  }
  SECTION("fewer rows than a draft block") {
    options.max_rows = 4;
    CheckNames(LoadStatus(options), "block_size");
  }
  SECTION("a folder that is not there") {
    options.model_dir = "/nonexistent-model";
    CheckNames(LoadStatus(options), "/nonexistent-model");
  }
}

TEST_CASE("damaged checkpoints are refused by name") {
  CheckpointCopy copy;
  EngineOptions options = GoldenOptions(true);
  options.model_dir = copy.model();
  options.drafter_dir = copy.drafter();
  const std::string shard = copy.model() + "/model-00002-of-00002.safetensors";
  SECTION("as it is") { CHECK(LoadStatus(options).ok()); }
  SECTION("an expert width that eight ranks cannot cut") {
    options.tp = 8;
    CheckpointCopy::Replace(copy.model() + "/config.json", "\"moe_intermediate_size\": 256",
                            "\"moe_intermediate_size\": 224");
    CheckNames(LoadStatus(options), "moe_intermediate_size");
  }
  SECTION("a missing shard") {
    std::filesystem::remove(shard);
    CheckNames(LoadStatus(options), "model-00002-of-00002.safetensors");
  }
  SECTION("a truncated shard") {
    std::filesystem::resize_file(shard, std::filesystem::file_size(shard) - 100);
    CheckNames(LoadStatus(options), "model-00002-of-00002.safetensors");
  }
  SECTION("a wrong dtype") {
    CheckpointCopy::Replace(copy.drafter() + "/model.safetensors", "\"BF16\"", "\"F16\" ");
    CheckNames(LoadStatus(options), ".weight");
  }
  SECTION("a wrong shape") {
    CheckpointCopy::Replace(copy.model() + "/config.json", "\"moe_intermediate_size\": 256",
                            "\"moe_intermediate_size\": 512");
    CheckNames(LoadStatus(options), "layers.1.mlp");
  }
  SECTION("a drafter for another width") {
    CheckpointCopy::Replace(copy.drafter() + "/config.json", "\"hidden_size\": 128", "\"hidden_size\": 256");
    CheckNames(LoadStatus(options), "hidden_size");
  }
  SECTION("a drafter for more layers than the target has") {
    CheckpointCopy::Replace(copy.drafter() + "/config.json", "\"num_target_layers\": 3",
                            "\"num_target_layers\": 4");
    CheckNames(LoadStatus(options), "num_target_layers");
  }
  SECTION("a drafter with a tensor that is not known") {
    CheckpointCopy::Replace(copy.drafter() + "/config.json", "\"num_hidden_layers\": 2",
                            "\"num_hidden_layers\": 1");
    CheckNames(LoadStatus(options), "tensors");
  }
}

}  // namespace kdt::testing
