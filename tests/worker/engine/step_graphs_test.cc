// Shapes of a step's pieces, and what a step of a known shape runs.
#include "worker/engine/step_graphs.h"

#include <map>
#include <string>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "tests/support/catch.h"
#include "tests/worker/support/idle_backend.h"

namespace kdt {
namespace {

TEST_CASE("shapes are the step's own where nothing is padded") {
  const auto backend = std::move(*kernels::MakeCpuBackend(1));
  const StepGraphs graphs(backend.get(), StepMode::kAuto, 100, 8);
  CHECK_FALSE(graphs.captures());
  CHECK_FALSE(graphs.pads());
  CHECK(graphs.Rows(37) == 37);
  CHECK(graphs.Sequences(5, 37) == 5);
}

TEST_CASE("shapes are the smallest bucket that holds a step") {
  const auto backend = std::move(*kernels::MakeCpuBackend(1));
  const StepGraphs graphs(backend.get(), StepMode::kEager, 100, 8);
  CHECK(graphs.row_buckets() == std::vector<int64_t>{1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100});
  for (int64_t rows = 1; rows <= 100; ++rows) {
    const int64_t shape = graphs.Rows(rows);
    CHECK(shape >= rows);
    const auto& buckets = graphs.row_buckets();
    const auto found = std::find(buckets.begin(), buckets.end(), shape);
    REQUIRE(found != buckets.end());
    CHECK((found == buckets.begin() || *(found - 1) < rows));
    // Every number of sequences that such a step can have finds a shape that was captured.
    const std::vector<int64_t> captured = graphs.SequenceBuckets(shape);
    for (int64_t sequences = 1; sequences <= std::min<int64_t>(rows, 8); ++sequences) {
      const int64_t bucket = graphs.Sequences(sequences, shape);
      CHECK(bucket >= sequences);
      CHECK(std::find(captured.begin(), captured.end(), bucket) != captured.end());
    }
  }
  CHECK(StepGraphs(backend.get(), StepMode::kEager, 3000, 8).row_buckets().back() == 3000);
  CHECK(StepGraphs(backend.get(), StepMode::kEager, 1, 8).row_buckets() == std::vector<int64_t>{1});
}

TEST_CASE("without a graph a piece's ops are called, and a capture that fails names the piece") {
  const auto backend = std::move(*kernels::MakeCpuBackend(1));
  StepGraphs graphs(backend.get(), StepMode::kAuto, 100, 8);
  int calls = 0;
  const auto ops = [&] {
    ++calls;
    return absl::OkStatus();
  };
  CHECK(graphs.Run(StepPiece::kForward, 5, 1, ops).ok());
  CHECK(calls == 1);
  CHECK(graphs.replays().empty());
  const absl::Status captured = graphs.Capture(StepPiece::kDraft, 8, 0, ops);
  CHECK(captured.code() == absl::StatusCode::kUnimplemented);
  CHECK(std::string(captured.message()).find("graph of draft for 8 rows") != std::string::npos);
}

// Captures without a device: a graph counts its replays.
class CountingBackend final : public testing::IdleBackend {
 public:
  bool can_capture() const override { return true; }
  absl::StatusOr<std::unique_ptr<kernels::Graph>> Capture(absl::FunctionRef<absl::Status()> record) override {
    KDT_RETURN_IF_ERROR(record());
    return std::make_unique<CountedGraph>(&replays);
  }
  int replays = 0;

 private:
  class CountedGraph final : public kernels::Graph {
   public:
    explicit CountedGraph(int* replays) : replays_(replays) {}
    absl::Status Replay() override {
      ++*replays_;
      return absl::OkStatus();
    }
    int64_t nodes() const override { return 3; }
    const std::vector<kernels::KernelUse>& kernel_uses() const override { return uses_; }

   private:
    int* replays_;
    std::vector<kernels::KernelUse> uses_;
  };
};

TEST_CASE("where graphs are captured, a shape without one is an error that names it") {
  CountingBackend backend;
  StepGraphs graphs(&backend, StepMode::kAuto, 100, 8);
  REQUIRE(graphs.captures());
  int calls = 0;
  const auto ops = [&] {
    ++calls;
    return absl::OkStatus();
  };
  REQUIRE(graphs.Capture(StepPiece::kForward, 8, 1, ops).ok());
  CHECK(calls == 1);
  CHECK(graphs.graphs() == 1);
  CHECK(graphs.nodes() == 3);
  REQUIRE(graphs.Run(StepPiece::kForward, 8, 1, ops).ok());
  CHECK(backend.replays == 1);
  CHECK(graphs.replays() == std::map<int64_t, int64_t>{{8, 1}});
  for (const auto& [piece, rows, sequences] :
       {std::tuple{StepPiece::kForward, 16, 1}, {StepPiece::kForward, 8, 4}, {StepPiece::kLogits, 8, 1}}) {
    const absl::Status missing = graphs.Run(piece, rows, sequences, ops);
    CHECK(missing.code() == absl::StatusCode::kInternal);
    CHECK(
        std::string(missing.message()).find(absl::StrCat("for ", rows, " rows, ", sequences, " sequences")) !=
        std::string::npos);
  }
  graphs.Clear();
  CHECK(graphs.Run(StepPiece::kForward, 8, 1, ops).code() == absl::StatusCode::kInternal);
  CHECK(calls == 1);
  CHECK(backend.replays == 1);

  // The same backend where nothing is to be captured.
  StepGraphs eager(&backend, StepMode::kEager, 100, 8);
  CHECK(eager.Run(StepPiece::kForward, 8, 1, ops).ok());
  CHECK(calls == 2);
}

}  // namespace
}  // namespace kdt
