#include <future>
#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "tests/worker/service/fake_worker.h"

namespace kdt {
namespace {

using Stream = grpc::ClientReaderWriter<v1::StepRequest, v1::StepResponse>;

std::string FreshId() {
  static int count = 0;
  return "service-" + std::to_string(getpid()) + "-" + std::to_string(++count);
}

v1::StepRequest MakeStep(uint64_t epoch, uint64_t step, uint32_t deadline_ms = 10000) {
  v1::StepRequest request;
  request.set_epoch(epoch);
  request.set_step(step);
  request.set_deadline_ms(deadline_ms);
  return request;
}

v1::StepResponse RunStep(Stream& stream, const v1::StepRequest& request) {
  v1::StepResponse response;
  REQUIRE(stream.Write(request));
  REQUIRE(stream.Read(&response));
  return response;
}

absl::StatusCode CodeOf(const v1::StepResponse& response) {
  return static_cast<absl::StatusCode>(response.error_code());
}

bool WaitFor(const std::function<bool()>& condition) {
  for (int i = 0; i < 1000 && !condition(); ++i) absl::SleepFor(absl::Milliseconds(10));
  return condition();
}

// Both ranks of a group of two, joined to `epoch`.
void JoinBoth(FakeWorker& zero, FakeWorker& one, uint64_t epoch) {
  const std::string id = FreshId();
  auto other = std::async(std::launch::async, [&] { return one.Join(epoch, id); });
  const grpc::Status status = zero.Join(epoch, id);
  CHECK(other.get().ok());
  REQUIRE(status.ok());
}

TEST_CASE("a worker answers describe while it loads and joins no group", "[service]") {
  FakeWorker worker(0, 1, ReduceOnce, /*loaded=*/false);
  worker.service().SetProgress(10, 40);
  v1::DescribeResponse response;
  {
    grpc::ClientContext context;
    REQUIRE(worker.stub->Describe(&context, {}, &response).ok());
  }
  CHECK_FALSE(response.ready());
  CHECK(response.loaded_bytes() == 10);
  CHECK(response.total_bytes() == 40);
  CHECK(response.backend() == "fake");
  CHECK(response.pid() == static_cast<uint32_t>(getpid()));
  CHECK(worker.Join(1, "x").error_code() == grpc::StatusCode::FAILED_PRECONDITION);

  worker.service().SetLoadError("shard 7 is missing");
  worker.engine().SetEngine(std::make_unique<FakeEngine>(ReduceOnce));
  grpc::ClientContext context;
  REQUIRE(worker.stub->Describe(&context, {}, &response).ok());
  CHECK(response.ready());
  CHECK(response.max_rows() == 77);
  CHECK(response.load_error() == "shard 7 is missing");
  CHECK(worker.Join(1, "x").ok());
  CHECK(worker.Epoch() == 1);
}

TEST_CASE("a join request with a field out of range is refused by name", "[service]") {
  FakeWorker worker(0, 1);
  REQUIRE(worker.Join(5, "x").ok());
  const auto join = [&](uint64_t epoch, uint32_t rank, uint32_t tp, uint32_t timeout_ms) {
    v1::JoinGroupRequest request;
    request.set_epoch(epoch);
    request.set_rank(rank);
    request.set_tp(tp);
    request.set_timeout_ms(timeout_ms);
    grpc::ClientContext context;
    v1::JoinGroupResponse response;
    return worker.stub->JoinGroup(&context, request, &response);
  };
  for (const auto& [status, text] : {std::pair{join(5, 0, 1, 100), "epoch: 5"},
                                     {join(0, 0, 1, 100), "epoch: 0"},
                                     {join(6, 1, 1, 100), "rank 1 of 1"},
                                     {join(6, 0, 2, 100), "rank 0 of 2"},
                                     {join(6, 0, 1, 0), "timeout_ms: 0"}}) {
    CHECK(status.error_code() == grpc::StatusCode::INVALID_ARGUMENT);
    CHECK(status.error_message().find(text) != std::string::npos);
  }
  CHECK(worker.Epoch() == 5);
}

TEST_CASE("an epoch that the engine cannot start is the join's error", "[service]") {
  FakeWorker worker(0, 1, ReduceOnce, false);
  worker.engine().SetEngine(std::make_unique<FakeEngine>(
      ReduceOnce, absl::InternalError("graph of forward for 8 rows: capture: gemm")));
  const grpc::Status joined = worker.Join(1, "x");
  CHECK(joined.error_code() == grpc::StatusCode::INTERNAL);
  CHECK(joined.error_message().find("capture: gemm") != std::string::npos);
  CHECK(worker.Epoch() == 0);
}

TEST_CASE("steps are answered in the order of the requests, also when many wait", "[service]") {
  FakeWorker worker(0, 1);
  REQUIRE(worker.Join(3, "x").ok());
  grpc::ClientContext context;
  const auto stream = worker.stub->Steps(&context);
  constexpr uint64_t kSteps = 200;
  std::jthread writer([&] {
    for (uint64_t step = 1; step <= kSteps; ++step) stream->Write(MakeStep(3, step));
  });
  for (uint64_t step = 1; step <= kSteps; ++step) {
    v1::StepResponse response;
    REQUIRE(stream->Read(&response));
    REQUIRE(response.error() == "");
    REQUIRE(response.step() == step);
    REQUIRE(response.epoch() == 3);
    REQUIRE(response.digest() == step * 1000 + 1);
  }
  writer.join();
  CHECK(worker.Epoch() == 3);
  stream->WritesDone();
  CHECK(stream->Finish().ok());
  CHECK(worker.Epoch() == 0);  // the end of the stream ends the epoch
}

TEST_CASE("a step of another epoch or out of order is an error in the answer", "[service]") {
  FakeWorker worker(0, 1);
  REQUIRE(worker.Join(3, "x").ok());
  grpc::ClientContext context;
  const auto stream = worker.stub->Steps(&context);
  CHECK(RunStep(*stream, MakeStep(3, 1)).error_code() == 0);

  SECTION("another epoch leaves the one that runs alone") {
    const v1::StepResponse response = RunStep(*stream, MakeStep(2, 2));
    CHECK(CodeOf(response) == absl::StatusCode::kFailedPrecondition);
    CHECK(response.error() == "epoch 2 does not run on this rank");
    CHECK(RunStep(*stream, MakeStep(3, 2)).error_code() == 0);
  }
  SECTION("a skipped step ends the epoch; a new one can be joined") {
    const v1::StepResponse response = RunStep(*stream, MakeStep(3, 3));
    CHECK(CodeOf(response) == absl::StatusCode::kFailedPrecondition);
    CHECK(response.error() == "step 3 came where step 2 was due");
    CHECK(worker.Epoch() == 0);
    CHECK(CodeOf(RunStep(*stream, MakeStep(3, 2))) == absl::StatusCode::kFailedPrecondition);
    REQUIRE(worker.Join(4, "x").ok());
    grpc::ClientContext second;
    CHECK(RunStep(*worker.stub->Steps(&second), MakeStep(4, 1)).error_code() == 0);
  }
  SECTION("a deadline out of range") {
    CHECK(RunStep(*stream, MakeStep(3, 2, 0)).error() == "deadline_ms: 0 is not in 1..3600000");
  }
}

TEST_CASE("an engine's error is answered and ends the epoch", "[service]") {
  FakeWorker worker(0, 1, [](Collective&, const v1::StepRequest&, v1::StepResponse* response) {
    response->add_results();
    return absl::InternalError("device fault");
  });
  REQUIRE(worker.Join(1, "x").ok());
  grpc::ClientContext context;
  const auto stream = worker.stub->Steps(&context);
  const v1::StepResponse response = RunStep(*stream, MakeStep(1, 1));
  CHECK(CodeOf(response) == absl::StatusCode::kInternal);
  CHECK(response.error() == "device fault");
  CHECK(response.results_size() == 0);
  CHECK(worker.Epoch() == 0);
}

TEST_CASE("a join without the other rank ends in time and names it", "[service]") {
  FakeWorker worker(0, 2);
  const std::string id = FreshId();
  const grpc::Status status = worker.Join(1, id, 200);
  CHECK(status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED);
  CHECK(status.error_message().find("rank 1") != std::string::npos);
  CHECK_FALSE(std::filesystem::exists("/dev/shm/kdt-" + id));
  CHECK(worker.Epoch() == 0);
}

TEST_CASE("a newer join takes the place of one that waits", "[service]") {
  FakeWorker zero(0, 2), one(1, 2);
  auto stuck = std::async(std::launch::async, [&] { return zero.Join(1, FreshId(), 60000); });
  absl::SleepFor(absl::Milliseconds(50));
  JoinBoth(zero, one, 2);
  CHECK(stuck.get().error_code() == grpc::StatusCode::CANCELLED);
  CHECK(zero.Epoch() == 2);
}

TEST_CASE("two ranks step together; one that gets no step is named by the other", "[service]") {
  FakeWorker zero(0, 2), one(1, 2);
  JoinBoth(zero, one, 1);
  grpc::ClientContext context_zero, context_one;
  const auto stream_zero = zero.stub->Steps(&context_zero), stream_one = one.stub->Steps(&context_one);
  for (uint64_t step = 1; step <= 20; ++step) {
    REQUIRE(stream_one->Write(MakeStep(1, step)));
    CHECK(RunStep(*stream_zero, MakeStep(1, step)).digest() == step * 1000 + 2);
    v1::StepResponse response;
    REQUIRE(stream_one->Read(&response));
    CHECK(response.digest() == step * 1000 + 2);
  }
  const v1::StepResponse response = RunStep(*stream_zero, MakeStep(1, 21, 150));
  CHECK(CodeOf(response) == absl::StatusCode::kDeadlineExceeded);
  CHECK(response.error() == "rank 1 did not come in time");
  CHECK(zero.Epoch() == 0);
}

TEST_CASE("cancelling the stream wakes a rank from a collective", "[service]") {
  FakeWorker zero(0, 2), one(1, 2);
  JoinBoth(zero, one, 1);
  auto context = std::make_unique<grpc::ClientContext>();
  auto stream = zero.stub->Steps(context.get());
  REQUIRE(stream->Write(MakeStep(1, 1, 600000)));  // rank 1 never gets it
  absl::SleepFor(absl::Milliseconds(100));
  context->TryCancel();
  CHECK(stream->Finish().error_code() == grpc::StatusCode::CANCELLED);
  CHECK(WaitFor([&] { return zero.Epoch() == 0; }));
  // The engine's thread is free again: both can form the next group.
  JoinBoth(zero, one, 2);
  grpc::ClientContext context_zero, context_one;
  const auto stream_zero = zero.stub->Steps(&context_zero), stream_one = one.stub->Steps(&context_one);
  REQUIRE(stream_one->Write(MakeStep(2, 1)));
  CHECK(RunStep(*stream_zero, MakeStep(2, 1)).error_code() == 0);
}

TEST_CASE("a stream that ends before its first step ends the epoch it was opened in", "[service]") {
  FakeWorker worker(0, 1);
  REQUIRE(worker.Join(1, "x").ok());
  auto old_context = std::make_unique<grpc::ClientContext>();
  const auto old_stream = worker.stub->Steps(old_context.get());
  CHECK(RunStep(*old_stream, MakeStep(1, 1)).error_code() == 0);
  REQUIRE(worker.Join(2, "x").ok());
  {
    grpc::ClientContext context;
    const auto stream = worker.stub->Steps(&context);
    stream->WritesDone();
    CHECK(stream->Finish().ok());
  }
  CHECK(worker.Epoch() == 0);
  REQUIRE(worker.Join(3, "x").ok());
  old_stream->WritesDone();
  CHECK(old_stream->Finish().ok());
  CHECK(worker.Epoch() == 3);  // an older epoch's stream does not touch the one that runs
}

TEST_CASE("drain answers behind the step in progress", "[service]") {
  absl::Notification started, go_on;
  FakeWorker worker(0, 1, [&](Collective&, const v1::StepRequest&, v1::StepResponse*) {
    started.Notify();
    go_on.WaitForNotification();
    return absl::OkStatus();
  });
  REQUIRE(worker.Join(1, "x").ok());
  grpc::ClientContext context;
  const auto stream = worker.stub->Steps(&context);
  REQUIRE(stream->Write(MakeStep(1, 1)));
  started.WaitForNotification();
  std::atomic<bool> answered{false};
  auto drain = std::async(std::launch::async, [&] {
    grpc::ClientContext drain_context;
    v1::DrainResponse response;
    const grpc::Status status = worker.stub->Drain(&drain_context, {}, &response);
    answered = true;
    return status.ok() ? response.steps() : 999;
  });
  absl::SleepFor(absl::Milliseconds(50));
  CHECK_FALSE(answered);
  go_on.Notify();
  CHECK(drain.get() == 1);
  v1::StepResponse response;
  REQUIRE(stream->Read(&response));
  CHECK(response.error_code() == 0);
  CHECK(WaitFor([&] { return worker.drained.load(); }));
}

TEST_CASE("a worker that ends while a step or a join waits does not hang", "[service]") {
  SECTION("step") {
    FakeWorker one(1, 2);
    grpc::ClientContext context;
    std::unique_ptr<Stream> stream;
    {
      FakeWorker zero(0, 2);
      JoinBoth(zero, one, 1);
      stream = zero.stub->Steps(&context);
      REQUIRE(stream->Write(MakeStep(1, 1, 600000)));
      absl::SleepFor(absl::Milliseconds(50));
    }
    CHECK_FALSE(stream->Finish().ok());
  }
  SECTION("join") {
    std::future<grpc::Status> joined;
    std::unique_ptr<v1::Worker::Stub> stub;
    {
      FakeWorker zero(0, 2);
      absl::Notification done;
      v1::JoinGroupRequest request;
      request.set_epoch(1);
      request.set_tp(2);
      request.set_collective_id(FreshId());
      request.set_timeout_ms(600000);
      zero.engine().JoinGroup(request, [&](absl::StatusOr<std::string> result) {
        CHECK(result.status().code() == absl::StatusCode::kCancelled);
        done.Notify();
      });
      absl::SleepFor(absl::Milliseconds(50));
      zero.engine().Drain([](uint64_t) {});
      done.WaitForNotification();
    }
  }
}

}  // namespace
}  // namespace kdt
