// Answers between a fast model and a slow client.
#include "coordinator/api/response_queue.h"

#include "tests/support/catch.h"

namespace kdt::testing {
namespace {

// Stands for gRPC: collects what is written; a write ends when the test says so.
class FakeWriter : public ResponseQueue::Writer {
 public:
  void OnDone() override {}
};

v1::GenerateResponse ChunkOf(uint32_t index, uint32_t token, size_t text_bytes) {
  v1::GenerateResponse response;
  response.set_index(index);
  response.mutable_chunk()->add_token_ids(token);
  response.mutable_chunk()->set_text(std::string(text_bytes, 'x'));
  return response;
}

}  // namespace

TEST_CASE("a client that does not read is cut off after the buffer's limit, and never blocks") {
  FakeWriter writer;
  ResponseQueue queue(&writer);
  size_t pushed = 0;
  bool taken = true;
  for (; taken && pushed < 100; ++pushed) taken = queue.Push(ChunkOf(0, 1, 1 << 20));
  CHECK_FALSE(taken);
  CHECK(pushed <= 1 + ResponseQueue::kMaxBufferedBytes / (1 << 20) + 1);
  queue.Detach();
}

TEST_CASE("a client that is always a little behind goes on: only what is unread counts") {
  FakeWriter writer;
  ResponseQueue queue(&writer);
  REQUIRE(queue.Push(ChunkOf(0, 1, 1 << 20)));  // is being written
  REQUIRE(queue.Push(ChunkOf(1, 1, 1 << 20)));
  // Samples take turns, so chunks are not joined and one always waits.
  for (uint32_t i = 2; i < 100; ++i) {
    REQUIRE(queue.Push(ChunkOf(i % 2, i, 1 << 20)));
    queue.OnWritten(true);
  }
  queue.Detach();
}

TEST_CASE("nothing happens behind the call's end") {
  FakeWriter writer;
  ResponseQueue queue(&writer);
  queue.Detach();
  CHECK(queue.Push(ChunkOf(0, 1, 10)));
  queue.End(absl::OkStatus());
  CHECK(queue.Push(ChunkOf(0, 2, 10)));
}

}  // namespace kdt::testing
