// Captured graphs, page-locked memory and the seal.
#include <cuda_runtime_api.h>

#include "tests/kernels/cuda/util.h"

namespace kdt::kernels::test {
namespace {

TEST_CASE("cuda: a graph replays copies and ops with what the buffers hold then") {
  KDT_NEED_GPU();
  constexpr int64_t kRows = 3, kWidth = 64;
  std::mt19937 rng(1);
  Twin x(rng, kRows, kWidth), sum(rng, kRows, kWidth);
  const size_t bytes = kRows * kWidth * sizeof(uint16_t);
  HostBuffer in = std::move(*HostBuffer::Make(*Gpu(), bytes));
  HostBuffer out = std::move(*HostBuffer::Make(*Gpu(), bytes));
  const std::vector<uint16_t> before = sum.device.Get();
  const auto graph = Gpu()->Capture([&]() -> absl::Status {
    if (absl::Status s = Gpu()->UploadAsync(x.device.data(), in.data(), bytes); !s.ok()) return s;
    if (absl::Status s = Gpu()->Add({x.gpu(), sum.gpu()}); !s.ok()) return s;
    return Gpu()->DownloadAsync(out.data(), sum.device.data(), bytes);
  });
  REQUIRE(graph.ok());
  CHECK((*graph)->nodes() == 3);
  CHECK(sum.device.Get() == before);  // recorded, not run

  std::vector<float> expected = ToFloat(before);
  const int64_t replays = Gpu()->stats().replays;
  for (int step = 1; step <= 3; ++step) {
    const std::vector<float> values = Normal(rng, kRows * kWidth);
    const std::vector<uint16_t> bits = ToBf16(values);
    std::memcpy(in.data(), bits.data(), bytes);
    REQUIRE((*graph)->Replay().ok());
    REQUIRE(Gpu()->Synchronize().ok());
    std::vector<uint16_t> got(kRows * kWidth);
    std::memcpy(got.data(), out.data(), bytes);
    for (size_t i = 0; i < expected.size(); ++i) {
      expected[i] = Bf16ToFloat(FloatToBf16(expected[i] + values[i]));
    }
    CHECK(ToFloat(got) == expected);
    CHECK(Gpu()->stats().replays == replays + step);
  }
}

// A gemm may be on the chip, and the one before it still be reading x, when the kernel between them writes x.
TEST_CASE("cuda: in a graph a gemm reads what the kernel in front of it wrote") {
  KDT_NEED_GPU();
  constexpr int64_t kIn = 1024, kOut = 512, kTimes = 12;
  std::mt19937 rng(7);
  for (const int64_t rows : {8, 16, 32, 64}) {
    CAPTURE(rows);
    Twin x(rng, rows, kIn), add(rng, rows, kIn), w(rng, kOut, kIn);
    const std::vector<uint16_t> before = x.device.Get();
    OnGpu<float> y(kTimes * rows * kOut, 0xff);
    const auto product = [&](int64_t i) {
      return Gpu()->Gemm({x.gpu(), w.gpu(), MakeTensor(y.data() + i * rows * kOut, DType::kF32, rows, kOut)});
    };
    for (int64_t i = 0; i < kTimes; ++i) {
      REQUIRE(product(i).ok());
      REQUIRE(Gpu()->Synchronize().ok());
      REQUIRE(Gpu()->Add({add.gpu(), x.gpu()}).ok());
      REQUIRE(Gpu()->Synchronize().ok());
    }
    const std::vector<float> expected = y.Get();
    const auto graph = Gpu()->Capture([&]() -> absl::Status {
      for (int64_t i = 0; i < kTimes; ++i) {
        if (absl::Status s = product(i); !s.ok()) return s;
        if (absl::Status s = Gpu()->Add({add.gpu(), x.gpu()}); !s.ok()) return s;
      }
      return absl::OkStatus();
    });
    REQUIRE(graph.ok());
    for (int replay = 0; replay < 5; ++replay) {
      x.device.Set(before);
      REQUIRE(cudaMemset(y.data(), 0xff, expected.size() * sizeof(float)) == cudaSuccess);
      REQUIRE((*graph)->Replay().ok());
      REQUIRE(Gpu()->Synchronize().ok());
      CHECK(y.Get() == expected);
    }
  }
}

TEST_CASE("cuda: queued copies of any size and alignment, both ways") {
  KDT_NEED_GPU();
  constexpr size_t kBytes = 600000;
  HostBuffer in = std::move(*HostBuffer::Make(*Gpu(), kBytes)),
             out = std::move(*HostBuffer::Make(*Gpu(), kBytes));
  Buffer device = std::move(*Buffer::Make(*Gpu(), kBytes));
  std::mt19937 rng(5);
  uint8_t salt = 0;
  // On both sides of what a kernel copies, and of what a thread does.
  for (const size_t bytes : {1, 3, 4, 12, 16, 2044, 2048, 2052, 40000, 131072, 131076, 131088, 500000}) {
    for (const size_t offset : {0, 4, 16, 1021}) {
      CAPTURE(bytes, offset);
      ++salt;
      for (size_t i = 0; i < bytes; ++i) in.data()[offset + i] = static_cast<char>(rng() >> 8);
      std::memset(out.data(), salt, kBytes);
      REQUIRE(Gpu()->UploadAsync(device.as<char>() + offset, in.data() + offset, bytes).ok());
      REQUIRE(Gpu()->DownloadAsync(out.data() + offset, device.as<char>() + offset, bytes).ok());
      REQUIRE(Gpu()->Synchronize().ok());
      CHECK(std::memcmp(out.data() + offset, in.data() + offset, bytes) == 0);
      CHECK(static_cast<uint8_t>(out.data()[offset + bytes]) == salt);
      if (offset > 0) CHECK(static_cast<uint8_t>(out.data()[offset - 1]) == salt);
    }
  }
}

TEST_CASE("cuda: a graph tells how its main kernels fill the device") {
  KDT_NEED_GPU();
  constexpr int64_t kRows = 4, kIn = 256, kOut = 512;
  std::mt19937 rng(3);
  Twin x(rng, kRows, kIn), w(rng, kOut, kIn), y(rng, kRows, kOut);
  const auto graph = Gpu()->Capture([&]() -> absl::Status {
    if (absl::Status s = Gpu()->Gemm({x.gpu(), w.gpu(), y.gpu()}); !s.ok()) return s;
    return Gpu()->Gemm({x.gpu(), w.gpu(), y.gpu()});
  });
  REQUIRE(graph.ok());
  const std::vector<KernelUse>& uses = (*graph)->kernel_uses();
  REQUIRE(uses.size() == 1);
  CHECK(std::string(uses[0].kernel).starts_with("gemm_"));
  CHECK(uses[0].occupancy > 0);
  CHECK(uses[0].occupancy <= 1);
  CHECK(uses[0].grid_fill > 0);
  CHECK(uses[0].grid_fill < 1);  // a quarter of a megabyte of weights does not fill a chip
}

TEST_CASE("cuda: a failed capture names the op, and the stream works afterwards") {
  KDT_NEED_GPU();
  std::mt19937 rng(2);
  Twin x(rng, 2, 64), y(rng, 2, 64);
  auto graph = Gpu()->Capture([&] { return absl::InternalError("gemm: refused"); });
  CHECK_THAT(std::string(graph.status().message()), Catch::Matchers::ContainsSubstring("capture: gemm"));
  // A wait for the device cannot be captured and spoils the capture.
  graph = Gpu()->Capture([&]() -> absl::Status {
    (void)cudaStreamSynchronize(static_cast<cudaStream_t>(Gpu()->stream()));
    return Gpu()->Add({x.gpu(), y.gpu()});
  });
  REQUIRE_FALSE(graph.ok());
  CHECK_THAT(std::string(graph.status().message()), Catch::Matchers::ContainsSubstring("add"));
  REQUIRE(Gpu()->Add({x.gpu(), y.gpu()}).ok());
  CHECK(Gpu()->Synchronize().ok());
}

TEST_CASE("cuda: a sealed backend refuses allocations and pageable copies by name") {
  KDT_NEED_GPU();
  Buffer device = std::move(*Buffer::Make(*Gpu(), 64));
  HostBuffer pinned = std::move(*HostBuffer::Make(*Gpu(), 64));
  std::vector<char> pageable(64);
  const auto refused = [](const absl::Status& status, const char* call) {
    CHECK(absl::IsFailedPrecondition(status));
    CHECK_THAT(std::string(status.message()), Catch::Matchers::ContainsSubstring(call));
  };
  Gpu()->Seal(true);
  refused(Buffer::Make(*Gpu(), 64).status(), "Allocate of 64 bytes");
  refused(HostBuffer::Make(*Gpu(), 64).status(), "AllocateHost");
  refused(Gpu()->Upload(device.data(), pageable.data(), 64), "Upload");
  refused(Gpu()->Download(pageable.data(), device.data(), 64), "Download");
  CHECK(Gpu()->UploadAsync(device.data(), pinned.data(), 64).ok());
  CHECK(Gpu()->Synchronize().ok());
  { const Buffer freed = std::move(device); }
  refused(Gpu()->Synchronize(), "freed");
  CHECK(Gpu()->Synchronize().ok());
  Gpu()->Seal(false);
  CHECK(Buffer::Make(*Gpu(), 64).ok());
}

TEST_CASE("cuda: the router gives padding rows no expert") {
  KDT_NEED_GPU();
  std::mt19937 rng(3);
  Twin x(rng, 4, 128), w(rng, 16, 128);
  const OnGpu<float> bias(std::vector<float>(16, 0.0f));
  const OnGpu<int32_t> ids(8, 0x11), row_count(std::vector<int32_t>{3});
  const OnGpu<float> weights(8, 0x11);
  RouterArgs args{x.gpu(), w.gpu(), bias.data(), 2, true, 1.0f, ids.data(), weights.data(), row_count.data()};
  REQUIRE(Gpu()->Router(args).ok());
  const std::vector<int32_t> chosen = ids.Get();
  const std::vector<float> weight = weights.Get();
  for (int i = 0; i < 8; ++i) {
    CHECK((chosen[i] >= 0) == (i < 6));
    CHECK((weight[i] > 0) == (i < 6));
  }
  CHECK(chosen[7] == -1);
}

}  // namespace
}  // namespace kdt::kernels::test
