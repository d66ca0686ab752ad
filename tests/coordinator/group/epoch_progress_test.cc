#include "coordinator/group/epoch_progress.h"

#include "absl/status/status.h"
#include "kdt/v1/worker.pb.h"
#include "tests/support/catch.h"

namespace kdt::testing {
namespace {

v1::StepResponse Answer(uint32_t rank, uint64_t step, uint64_t digest) {
  v1::StepResponse response;
  response.set_rank(rank);
  response.set_step(step);
  response.set_digest(digest);
  return response;
}

v1::StepResponse Error(uint32_t rank, absl::StatusCode code, const std::string& what) {
  v1::StepResponse response = Answer(rank, 1, 0);
  response.set_error_code(static_cast<uint32_t>(code));
  response.set_error(what);
  return response;
}

}  // namespace

TEST_CASE("answers are compared in whatever order they come, up to one step behind") {
  EpochProgress progress;
  progress.Begin(3);
  CHECK(progress.NextStep() == 1);
  CHECK(progress.Take(1, Answer(1, 1, 70)));  // rank 0's is not there yet
  CHECK(progress.Take(0, Answer(0, 1, 70)));
  CHECK(progress.NextStep() == 2);
  CHECK(progress.Take(0, Answer(0, 2, 80)));
  CHECK(progress.Take(2, Answer(2, 1, 70)));  // compared with rank 0's of the step before
  CHECK_FALSE(progress.AllAnswered(2));
  CHECK(progress.AllAnswered(1));
  CHECK_FALSE(progress.failed());
  progress.Take(2, Answer(2, 2, 81));
  CHECK(progress.failed());
  CHECK(progress.blame().rank == 2);
  CHECK(progress.blame().what == "its state differs from that of rank 0 after step 2 (digests differ)");
  progress.Begin(3);
  CHECK_FALSE(progress.failed());
}

TEST_CASE("ranks that owe an answer when the time is over are late") {
  EpochProgress progress;
  progress.Begin(3);
  progress.NextStep();
  CHECK(progress.Take(0, Answer(0, 1, 70)));
  CHECK(progress.Take(2, Answer(2, 1, 70)));
  progress.FailLate(1500);
  CHECK(progress.blame().rank == 1);
  CHECK(progress.blame().what == "no answer to step 1 within 1500 ms");
}

TEST_CASE("the rank that caused a failure is blamed, not those that felt it") {
  EpochProgress progress;
  progress.Begin(3);
  progress.NextStep();
  CHECK_FALSE(progress.Take(0, Error(0, absl::StatusCode::kDeadlineExceeded, "a peer did not come")));
  CHECK(progress.blame().rank == 1);  // it owes its answer, as rank 2 does
  CHECK(progress.blame().what == "it left the others waiting in step 1");
  progress.Take(1, Error(1, absl::StatusCode::kAborted, "a peer did not come"));
  CHECK(progress.blame().rank == 2);
  SECTION("its own error") {
    progress.Take(2, Error(2, absl::StatusCode::kInternal, "the device is broken"));
    CHECK(progress.blame().what == "step 1 failed: the device is broken");
  }
  SECTION("its end") {
    progress.Died(2, "killed");
    progress.Died(1, "killed behind it");
    CHECK(progress.blame().what == "killed");
  }
  SECTION("an answer out of turn") {
    CHECK_FALSE(progress.Take(2, Answer(2, 2, 0)));
    CHECK(progress.blame().what == "it answered as rank 2 to step 2 when step 1 was due");
  }
}

}  // namespace kdt::testing
