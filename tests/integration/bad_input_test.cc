// Bad requests and bad checkpoints: a clear error that names the field or the file, and nobody else is
// disturbed.
#include <filesystem>
#include <fstream>
#include <limits>
#include <thread>

#include "tests/support/catch.h"
#include "tests/support/cluster.h"
#include "tests/support/requests.h"

namespace kdt::testing {
namespace {

namespace fs = std::filesystem;

v1::GenerateRequest Valid() { return GreedyRequest(kShortPrompt, 4); }

struct BadCase {
  const char* field;  // must be named in the message
  void (*spoil)(v1::GenerateRequest*);
};

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

const BadCase kBadCases[] = {
    {"token_ids", [](auto* r) { r->mutable_token_ids()->add_ids(1024); }},
    {"token_ids", [](auto* r) { r->mutable_token_ids()->add_ids(0xffffffffU); }},
    {"prompt", [](auto* r) { r->mutable_token_ids()->clear_ids(); }},
    {"prompt", [](auto* r) { r->set_text(""); }},
    {"prompt", [](auto* r) { r->clear_prompt(); }},
    {"temperature", [](auto* r) { r->mutable_sampling()->set_temperature(-1); }},
    {"temperature", [](auto* r) { r->mutable_sampling()->set_temperature(kNaN); }},
    {"temperature",
     [](auto* r) { r->mutable_sampling()->set_temperature(std::numeric_limits<float>::infinity()); }},
    {"top_p", [](auto* r) { r->mutable_sampling()->set_top_p(0); }},
    {"top_p", [](auto* r) { r->mutable_sampling()->set_top_p(1.5F); }},
    {"top_p", [](auto* r) { r->mutable_sampling()->set_top_p(kNaN); }},
    {"top_k", [](auto* r) { r->mutable_sampling()->set_top_k(-2); }},
    {"min_p", [](auto* r) { r->mutable_sampling()->set_min_p(-0.1F); }},
    {"repetition_penalty", [](auto* r) { r->mutable_sampling()->set_repetition_penalty(0); }},
    {"frequency_penalty", [](auto* r) { r->mutable_sampling()->set_frequency_penalty(kNaN); }},
    {"presence_penalty", [](auto* r) { r->mutable_sampling()->set_presence_penalty(kNaN); }},
    {"logit_bias", [](auto* r) { (*r->mutable_sampling()->mutable_logit_bias())[5000] = 1; }},
    {"logit_bias", [](auto* r) { (*r->mutable_sampling()->mutable_logit_bias())[5] = kNaN; }},
    {"n", [](auto* r) { r->mutable_sampling()->set_n(0); }},
    {"n", [](auto* r) { r->mutable_sampling()->set_n(1000000); }},
    {"max_tokens", [](auto* r) { r->mutable_stop()->set_max_tokens(0); }},
    {"stop_token_ids", [](auto* r) { r->mutable_stop()->add_stop_token_ids(99999); }},
    {"stop", [](auto* r) { r->mutable_stop()->add_stop(""); }},
    {"logprobs", [](auto* r) { r->mutable_output()->set_logprobs(100000); }},
    {"prompt_logprobs", [](auto* r) { r->mutable_output()->set_prompt_logprobs(100000); }},
    {"budget", [](auto* r) { r->mutable_speculation()->set_budget(1000000); }},
    {"messages", [](auto* r) { r->mutable_chat(); }},
    {"role", [](auto* r) { r->mutable_chat()->add_messages()->set_role("king"); }},
};

// A copy of the golden checkpoint that a test may spoil.
struct CheckpointCopy {
  explicit CheckpointCopy() : dir(*MakeTempDir("kdt-test-model-")) {
    fs::copy(GoldenModel(), dir, fs::copy_options::recursive);
  }
  ~CheckpointCopy() { RemoveTree(dir); }
  std::string dir;
};

// Launches on a checkpoint that must be refused: the launcher ends with an error and its log names
// `expected`.
void CheckRefused(const std::string& model, const std::string& expected,
                  const std::vector<std::string>& flags = {}) {
  const std::string dir = *MakeTempDir("kdt-test-");
  ChildProcess::Options process;
  process.name = "kdt-launch";
  process.argv = {std::string(KDT_BIN_DIR) + "/kdt-launch", "--model=" + model, "--tp=2",
                  "--listen=127.0.0.1:0"};
  process.argv.insert(process.argv.end(), flags.begin(), flags.end());
  process.stderr_path = dir + "/log";
  process.capture_stdout = true;
  auto launcher = ChildProcess::Start(process);
  REQUIRE(launcher.ok());
  REQUIRE(launcher->WaitEnded(30000));
  CHECK(launcher->exit_status().value_or(0) != 0);
  std::ifstream file(dir + "/log");
  const std::string log((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  INFO(log);
  CHECK(log.find(expected) != std::string::npos);
  RemoveTree(dir);
}

}  // namespace

TEST_CASE("every bad field is refused by name while another request goes on") {
  Cluster cluster({GoldenModel(), "", 2, {"--max_context=2048"}});
  std::vector<Sample> expected;
  v1::GenerateRequest other = Valid();
  other.mutable_stop()->set_max_tokens(400);
  REQUIRE(Generate(cluster.stub(), other, &expected).ok());

  std::vector<Sample> undisturbed;
  grpc::Status other_status;
  std::thread thread([&] { other_status = Generate(cluster.stub(), other, &undisturbed); });
  for (const BadCase& bad : kBadCases) {
    v1::GenerateRequest request = Valid();
    bad.spoil(&request);
    std::vector<Sample> samples;
    const grpc::Status status = Generate(cluster.stub(), request, &samples);
    INFO("field " << bad.field << ": " << status.error_message());
    CHECK(status.error_code() == grpc::StatusCode::INVALID_ARGUMENT);
    CHECK(status.error_message().find(bad.field) != std::string::npos);
  }
  SECTION("a prompt longer than the context") {
    v1::GenerateRequest request = Valid();
    for (int i = 0; i < 3000; ++i) request.mutable_token_ids()->add_ids(1);
    std::vector<Sample> samples;
    const grpc::Status status = Generate(cluster.stub(), request, &samples);
    CHECK(status.error_code() == grpc::StatusCode::INVALID_ARGUMENT);
    CHECK(status.error_message().find("2048") != std::string::npos);
  }
  thread.join();
  CHECK(other_status.ok());
  CHECK(undisturbed[0].tokens == expected[0].tokens);
}

TEST_CASE("speculation that does not fit is refused at start with the flag's or field's name") {
  SECTION("a budget over the ranks' limit") {
    CheckRefused(GoldenModel(), "--budget: 256", {"--drafter=" + GoldenDrafter(), "--budget=256"});
  }
  SECTION("a drafter made for another target") {
    CheckRefused(ShippedModel(), "hidden_size", {"--drafter=" + GoldenDrafter()});
  }
}

TEST_CASE("a spoiled checkpoint is refused with the file's name") {
  CheckpointCopy copy;
  const fs::path shard = fs::path(copy.dir) / "model-00002-of-00002.safetensors";
  SECTION("missing shard") {
    fs::remove(shard);
    CheckRefused(copy.dir, "model-00002-of-00002.safetensors");
  }
  SECTION("truncated shard") {
    fs::resize_file(shard, fs::file_size(shard) - 4096);
    CheckRefused(copy.dir, "model-00002-of-00002.safetensors");
  }
  SECTION("wrong dtype") {
    std::fstream file(shard, std::ios::in | std::ios::out | std::ios::binary);
    std::string head(100000, '\0');
    file.read(head.data(), static_cast<std::streamsize>(head.size()));
    const size_t at = head.find("\"BF16\"");
    REQUIRE(at != std::string::npos);
    file.seekp(static_cast<std::streamoff>(at));
    file.write(" \"F16\"", 6);  // as long as the text it replaces
    file.close();
    CheckRefused(copy.dir, "F16");
  }
  SECTION("an architecture that is not supported") {
    std::ofstream(fs::path(copy.dir) / "config.json") << R"({"model_type": "llama", "architectures": ["X"]})";
    CheckRefused(copy.dir, "model_type");
  }
}

}  // namespace kdt::testing
