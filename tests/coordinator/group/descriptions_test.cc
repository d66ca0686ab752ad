#include "coordinator/group/descriptions.h"

#include <string>

#include "tests/support/catch.h"

namespace kdt::testing {

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

}  // namespace kdt::testing
