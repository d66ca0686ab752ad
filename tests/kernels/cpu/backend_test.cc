// What a backend does that is no op.
#include "kdt/kernels/backend.h"

#include <cstdint>
#include <cstring>

#include "tests/kernels/cpu/util.h"

namespace kdt::kernels::test {
namespace {

TEST_CASE("the CPU's host memory is plain memory, its queued copies are done at once", "[backend]") {
  const auto backend = MakeBackend();
  absl::StatusOr<HostBuffer> host = HostBuffer::Make(*backend, 100);
  REQUIRE(host.ok());
  CHECK(reinterpret_cast<uintptr_t>(host->data()) % 64 == 0);
  for (int i = 0; i < 100; ++i) CHECK(host->data()[i] == 0);
  absl::StatusOr<Buffer> device = Buffer::Make(*backend, 100);
  REQUIRE(device.ok());
  std::memset(host->data(), 7, 100);
  REQUIRE(backend->UploadAsync(device->data(), host->data(), 100).ok());
  CHECK(device->as<char>()[99] == 7);
  device->as<char>()[99] = 8;
  REQUIRE(backend->DownloadAsync(host->data(), device->data(), 100).ok());
  CHECK(host->data()[99] == 8);
  CHECK(absl::IsResourceExhausted(HostBuffer::Make(*backend, SIZE_MAX).status()));
}

TEST_CASE("the CPU captures nothing", "[backend]") {
  const auto backend = MakeBackend();
  CHECK_FALSE(backend->can_capture());
  CHECK(backend->stream() == nullptr);
  const auto graph = backend->Capture([] { return absl::OkStatus(); });
  CHECK(absl::IsUnimplemented(graph.status()));
  CHECK_THAT(std::string(graph.status().message()), Catch::Matchers::ContainsSubstring("cpu"));
}

}  // namespace
}  // namespace kdt::kernels::test
