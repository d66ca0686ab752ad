// The small parts of common: checked arithmetic, INT4, addresses, notes on workers, signals, the metrics
// endpoint, clock.
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <vector>

#include "common/address.h"
#include "common/checked.h"
#include "common/clock.h"
#include "common/int4.h"
#include "common/metrics.h"
#include "common/process.h"
#include "common/safetensors.h"
#include "common/worker_note.h"
#include "prometheus/counter.h"
#include "prometheus/registry.h"
#include "tests/support/catch.h"

namespace kdt {
namespace {

using Catch::Matchers::ContainsSubstring;

TEST_CASE("checked arithmetic reports overflow") {
  CHECK(CheckedMul(1u << 31, 2) == uint64_t{1} << 32);
  CHECK_FALSE(CheckedMul(uint64_t{1} << 32, uint64_t{1} << 32).has_value());
  CHECK(CheckedProduct(std::vector<int64_t>{}) == 1u);
  CHECK(CheckedProduct(std::vector<int64_t>{3, 0, 5}) == 0u);
  CHECK_FALSE(CheckedProduct(std::vector<int64_t>{3, -1}).has_value());
  CHECK_FALSE(CheckedProduct(std::vector<int64_t>{int64_t{1} << 62, 4}).has_value());
}

TEST_CASE("bfloat16 rounds to nearest even") {
  CHECK(Bf16ToFloat(0x3f80) == 1.0f);
  CHECK(FloatToBf16(1.0f) == 0x3f80);
  CHECK(FloatToBf16(1.00390625f) == 0x3f80);  // half way between 1 and the next: to even
  CHECK(FloatToBf16(1.01171875f) == 0x3f82);  // half way, to even upwards
  CHECK(FloatToBf16(-2.5f) == 0xc020);
  CHECK(FloatToBf16(3.4e38f) == 0x7f80);  // rounds to infinity
  CHECK(std::isnan(Bf16ToFloat(FloatToBf16(std::nanf("")))));
}

TEST_CASE("INT4 weights unpack as stored") {
  // Input values 0..7 of a word are -8..-1 in turn, the next word's 0..7.
  std::vector<int32_t> packed(8, 0);
  packed[0] = static_cast<int32_t>(0x76543210u);
  packed[1] = static_cast<int32_t>(0xfedcba98u);
  const std::vector<uint16_t> scale = {FloatToBf16(0.5f), FloatToBf16(2.0f)};
  std::vector<float> out(64);
  Int4Dequantize(packed.data(), scale.data(), 64, 32, 0, 1, out.data());
  for (int i = 0; i < 16; ++i) CHECK(out[static_cast<size_t>(i)] == 0.5f * static_cast<float>(i - 8));
  CHECK(out[31] == -4.0f);
  CHECK(out[32] == -16.0f);
  CHECK(Int4Weight(packed.data(), scale.data(), 64, 32, 0, 9) == 0.5f);
  // The reference checkpoint's experts: the shape tensor agrees and the weights look like weights.
  const auto model = Checkpoint::Open(KDT_GOLDENS_DIR "/model");
  REQUIRE(model.ok());
  const std::string name = "language_model.model.layers.1.mlp.experts.0.gate_proj.";
  const auto weight = model->Find(name + "weight_packed", DType::kI32, {256, 16});
  const auto scales = model->Find(name + "weight_scale", DType::kBF16, {256, 4});
  REQUIRE((weight.ok() && scales.ok()));
  CHECK(model->Find(name + "weight_shape", DType::kI32, {2})->As<int32_t>()[1] == 128);
  std::vector<float> dense(256 * 128);
  Int4Dequantize(weight->As<int32_t>().data(), scales->As<uint16_t>().data(), 128, 32, 0, 256, dense.data());
  double sum = 0.0, squares = 0.0;
  for (const float w : dense) sum += w, squares += static_cast<double>(w) * w;
  CHECK(std::abs(sum / 32768.0) < 0.01);
  CHECK(squares / 32768.0 > 1e-6);
}

TEST_CASE("addresses") {
  const auto parsed = [](const char* text) { return ParseAddress(text, "--listen")->ToString(); };
  CHECK(parsed("127.0.0.1:50051") == "127.0.0.1:50051");
  CHECK(parsed("localhost:0") == "localhost:0");
  CHECK(parsed("[::1]:80") == "[::1]:80");
  CHECK(parsed("unix:/tmp/a b.sock") == "unix:/tmp/a b.sock");
  CHECK(parsed("unix:///tmp/x") == "unix:/tmp/x");
  CHECK(ParseAddress("unix:x", "a")->is_unix());
  for (const std::string& bad :
       std::vector<std::string>{"", "host", "host:", ":80", "host:65536", "host:-1", "host:+1", "host:8x",
                                "::1:80", "[::1]", "unix:", "unix:" + std::string(108, 'a'), "host: 80"}) {
    INFO(bad);
    const auto address = ParseAddress(bad, "--listen");
    REQUIRE_FALSE(address.ok());
    CHECK_THAT(std::string(address.status().message()), ContainsSubstring("--listen"));
  }
}

// One HTTP GET of /metrics on loopback; the whole answer.
std::string Scrape(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string answer;
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) {
    const std::string request = "GET /metrics HTTP/1.0\r\n\r\n";
    if (write(fd, request.data(), request.size()) == static_cast<ssize_t>(request.size())) {
      char buffer[4096];
      for (ssize_t n; (n = read(fd, buffer, sizeof(buffer))) > 0;)
        answer.append(buffer, static_cast<size_t>(n));
    }
  }
  close(fd);
  return answer;
}

TEST_CASE("a loss note lies beside a worker's socket, one line of it is read") {
  const std::string dir = *MakeTempDir("kdt-test-"), address = "unix:" + dir + "/rank0.sock";
  CHECK(ReadLossNote(address).empty());
  WriteLossNote(address, "worker 0 exited with status 1\nand more");
  CHECK(ReadLossNote(address) == "worker 0 exited with status 1");
  WriteLossNote(address, std::string(5000, 'x'));
  CHECK(ReadLossNote(address) == std::string(1024, 'x'));
  RemoveLossNote(address);
  CHECK(ReadLossNote(address).empty());
  CHECK(std::filesystem::is_empty(dir));
  WriteLossNote("127.0.0.1:7000", "nowhere to put it");
  CHECK(ReadLossNote("127.0.0.1:7000").empty());
  RemoveTree(dir);
}

TEST_CASE("a note that a worker hangs is taken once") {
  const std::string dir = *MakeTempDir("kdt-test-"), address = "unix:" + dir + "/rank0.sock";
  CHECK_FALSE(TakeHangNote(address));
  CHECK(WriteHangNote(address));
  CHECK_FALSE(TakeHangNote("unix:" + dir + "/rank1.sock"));
  CHECK(TakeHangNote(address));
  CHECK_FALSE(TakeHangNote(address));
  CHECK_FALSE(WriteHangNote("127.0.0.1:7000"));
  CHECK_FALSE(TakeHangNote("127.0.0.1:7000"));
  RemoveTree(dir);
}

TEST_CASE("a hangup that is ignored, as under nohup, is not waited for") {
  sigset_t before;
  REQUIRE(pthread_sigmask(SIG_SETMASK, nullptr, &before) == 0);
  for (const bool ignored : {false, true}) {
    const auto old = signal(SIGHUP, ignored ? SIG_IGN : SIG_DFL);
    const sigset_t waited = BlockSignals({SIGHUP, SIGTERM});
    CHECK(sigismember(&waited, SIGHUP) == (ignored ? 0 : 1));
    CHECK(sigismember(&waited, SIGTERM) == 1);
    signal(SIGHUP, old);
    REQUIRE(pthread_sigmask(SIG_SETMASK, &before, nullptr) == 0);
  }
}

TEST_CASE("the metrics endpoint serves its registry and reports a taken port") {
  const auto registry = std::make_shared<prometheus::Registry>();
  prometheus::BuildCounter().Name("kdt_test_total").Help("h").Register(*registry).Add({}).Increment(3);
  const auto server = MetricsServer::Start(*ParseAddress("127.0.0.1:0", "a"), registry);
  REQUIRE(server.ok());
  REQUIRE((*server)->port() > 0);
  CHECK_THAT(Scrape((*server)->port()), ContainsSubstring("kdt_test_total 3"));
  const Address taken{.host = "127.0.0.1", .port = (*server)->port()};
  const auto second = MetricsServer::Start(taken, registry);
  REQUIRE_FALSE(second.ok());
  CHECK_THAT(std::string(second.status().message()), ContainsSubstring(taken.ToString()));
  CHECK_FALSE(MetricsServer::Start(Address{.unix_path = "x"}, registry).ok());
}

TEST_CASE("the clock never goes back") {
  const int64_t first = MonotonicMicros();
  CHECK(MonotonicMicros() >= first);
}

}  // namespace
}  // namespace kdt
