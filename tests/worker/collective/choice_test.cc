#include "worker/collective/choice.h"

#include <vector>

#include "tests/support/catch.h"

namespace kdt {

TEST_CASE("--collective is read by backend, and refused by name") {
  using Kind = CollectiveKind;
  CHECK(*ParseCollectiveKind("auto", "cpu") == Kind::kAuto);
  CHECK(*ParseCollectiveKind("shm", "cpu") == Kind::kShm);
  CHECK(*ParseCollectiveKind("auto", "cuda") == Kind::kAuto);
  CHECK(*ParseCollectiveKind("ipc", "cuda") == Kind::kIpc);
  CHECK(*ParseCollectiveKind("nccl", "cuda") == Kind::kNccl);
  for (const auto& [text, backend] :
       {std::pair{"shm", "cuda"}, {"ipc", "cpu"}, {"nccl", "cpu"}, {"", "cuda"}}) {
    const auto kind = ParseCollectiveKind(text, backend);
    REQUIRE_FALSE(kind.ok());
    CHECK(kind.status().code() == absl::StatusCode::kInvalidArgument);
    CHECK(kind.status().message().find("--collective: \"" + std::string(text)) == 0);
    CHECK(kind.status().message().find(backend) != absl::string_view::npos);
  }
}

TEST_CASE("the fastest method is taken for each size, the next larger size's in between") {
  const std::vector<ReduceTimes> times = {{8192, {5, 9, 12}},
                                          {16384, {6, 9, 12}},
                                          {32768, {9, 8, 12}},
                                          {65536, {20, 12, 12}},
                                          {131072, {40, 20, 15}}};
  const ReduceChoice choice = ReduceChoice::Fastest(times);
  CHECK(choice.Of(1) == ReduceMethod::kOneShot);
  CHECK(choice.Of(16384) == ReduceMethod::kOneShot);
  CHECK(choice.Of(16385) == ReduceMethod::kTwoShot);
  CHECK(choice.Of(65536) == ReduceMethod::kTwoShot);
  CHECK(choice.Of(65537) == ReduceMethod::kNccl);
  CHECK(choice.Of(size_t{1} << 40) == ReduceMethod::kNccl);
  CHECK(choice.Uses(ReduceMethod::kNccl));
  CHECK(choice.ToString() == "one-shot to 16 KiB, two-shot to 64 KiB, nccl above");
}

TEST_CASE("methods that are not there are never chosen") {
  const std::vector<ReduceTimes> times = {{8192, {7, 3, -1}}, {16384, {3, 7, -1}}, {32768, {2, 7, -1}}};
  const ReduceChoice choice = ReduceChoice::Fastest(times);
  CHECK_FALSE(choice.Uses(ReduceMethod::kNccl));
  CHECK(choice.Of(100) == ReduceMethod::kTwoShot);
  CHECK(choice.Of(10000) == ReduceMethod::kOneShot);
  CHECK(choice.ToString() == "two-shot to 8 KiB, one-shot above");
  CHECK(ReduceTimesTable(times).find("-") != std::string::npos);

  const ReduceChoice one =
      ReduceChoice::Fastest(std::vector<ReduceTimes>{{8192, {-1, -1, 5}}, {16384, {-1, -1, 6}}});
  CHECK(one.Of(1) == ReduceMethod::kNccl);
  CHECK(one.ToString() == "nccl");
}

TEST_CASE("without a measurement the size decides") {
  const ReduceChoice choice = ReduceChoice::BySize(65536);
  CHECK(choice.Of(65536) == ReduceMethod::kOneShot);
  CHECK(choice.Of(65537) == ReduceMethod::kTwoShot);
}

}  // namespace kdt
