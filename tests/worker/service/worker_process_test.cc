// kdt-worker as a process, driven as a coordinator would.
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/process.h"
#include "kdt/v1/worker.grpc.pb.h"
#include "tests/support/catch.h"
#include "tests/support/http.h"

namespace kdt {
namespace {

constexpr int kStartMs = 60000;
constexpr char kReady[] = "kdt-worker ready listen=";

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

bool WaitFor(const std::function<bool()>& condition, int timeout_ms = kStartMs) {
  for (int ms = 0; ms < timeout_ms && !condition(); ms += 20)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  return condition();
}

class TempFolder {
 public:
  TempFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "kdt-worker-test-XXXXXX").string();
    REQUIRE(mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

class Worker {
 public:
  Worker(const TempFolder& folder, int rank, int tp, std::vector<std::string> more = {})
      : rank_(rank), tp_(tp) {
    log_ = folder / absl::StrCat("log", rank);
    ChildProcess::Options options;
    options.name = absl::StrCat("worker ", rank);
    options.argv = {KDT_BIN_DIR "/kdt-worker",
                    "--model",
                    KDT_GOLDENS_DIR "/model",
                    "--listen",
                    absl::StrCat("unix:", folder / absl::StrCat("rank", rank)),
                    absl::StrCat("--rank=", rank),
                    absl::StrCat("--tp=", tp),
                    "--kv_slots=512",
                    "--max_context=256",
                    "--max_rows=64"};
    options.argv.insert(options.argv.end(), more.begin(), more.end());
    options.capture_stdout = true;
    options.stderr_path = log_;
    auto process = ChildProcess::Start(options);
    REQUIRE(process.ok());
    process_ = std::make_unique<ChildProcess>(std::move(*process));
  }

  // Waits for the port, and with `loaded` for the weights.
  void Start(bool loaded = true) {
    const auto line = process_->WaitForLine(kReady, kStartMs);
    INFO(Log());
    REQUIRE(line.ok());
    stub_ = v1::Worker::NewStub(
        grpc::CreateChannel(line->substr(sizeof(kReady) - 1), grpc::InsecureChannelCredentials()));
    if (loaded) REQUIRE(WaitFor([&] { return Describe().ready(); }));
  }

  v1::DescribeResponse Describe() {
    v1::DescribeResponse response;
    grpc::ClientContext context;
    stub_->Describe(&context, {}, &response);
    return response;
  }

  grpc::Status Join(uint64_t epoch, const std::string& id) {
    v1::JoinGroupRequest request;
    request.set_epoch(epoch);
    request.set_rank(static_cast<uint32_t>(rank_));
    request.set_tp(static_cast<uint32_t>(tp_));
    request.set_collective_id(id);
    request.set_timeout_ms(kStartMs);
    grpc::ClientContext context;
    v1::JoinGroupResponse response;
    const grpc::Status status = stub_->JoinGroup(&context, request, &response);
    context_ = std::make_unique<grpc::ClientContext>();
    stream_ = stub_->Steps(context_.get());
    return status;
  }

  void Send(const v1::StepRequest& request) { REQUIRE(stream_->Write(request)); }
  v1::StepResponse Receive() {
    v1::StepResponse response;
    INFO(Log());
    REQUIRE(stream_->Read(&response));
    return response;
  }

  void CloseStream() {
    stream_->WritesDone();
    CHECK(stream_->Finish().ok());
  }

  ChildProcess& process() { return *process_; }
  v1::Worker::Stub& stub() { return *stub_; }
  std::string Log() const { return ReadFile(log_); }

 private:
  int rank_, tp_;
  std::string log_;
  std::unique_ptr<ChildProcess> process_;
  std::unique_ptr<v1::Worker::Stub> stub_;
  std::unique_ptr<grpc::ClientContext> context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::StepRequest, v1::StepResponse>> stream_;
};

void JoinBoth(Worker& zero, Worker& one, uint64_t epoch) {
  const std::string id = absl::StrCat("process-test-", getpid(), "-", epoch);
  auto other = std::async(std::launch::async, [&] { return one.Join(epoch, id); });
  const grpc::Status status = zero.Join(epoch, id);
  CHECK(other.get().ok());
  INFO(status.error_message());
  REQUIRE(status.ok());
}

void SetNeutral(v1::SamplingState* sampling, uint32_t prompt_length) {
  sampling->set_top_p(1);
  sampling->set_repetition_penalty(1);
  sampling->set_prompt_length(prompt_length);
}

v1::StepRequest PrefillStep(const std::vector<uint32_t>& prompt) {
  v1::StepRequest request;
  request.set_epoch(1);
  request.set_step(1);
  request.set_deadline_ms(30000);
  v1::CreateSequence* create = request.add_ops()->mutable_create();
  create->set_sequence_id(9);
  SetNeutral(create->mutable_sampling(), static_cast<uint32_t>(prompt.size()));
  v1::PrefillChunk* chunk = request.add_prefill();
  chunk->set_sequence_id(9);
  for (const uint32_t token : prompt) chunk->add_tokens(token);
  chunk->set_sample(true);
  return request;
}

TEST_CASE("two worker processes generate the reference's greedy tokens and end on SIGTERM", "[worker]") {
  const nlohmann::json golden = nlohmann::json::parse(ReadFile(KDT_GOLDENS_DIR "/target.json"))["prompts"][0];
  const auto prompt = golden["tokens"].get<std::vector<uint32_t>>();
  const auto greedy = golden["greedy"].get<std::vector<uint32_t>>();
  TempFolder folder;
  Worker zero(folder, 0, 2, {"--metrics_port=0", "--attention=validate", "--validate_every=3"}),
      one(folder, 1, 2);
  zero.Start();
  one.Start();
  const v1::DescribeResponse description = zero.Describe();
  CHECK(description.backend() == "cpu");
  CHECK_FALSE(description.arch().empty());
  CHECK(description.kv_slots_total() == 512);
  CHECK(description.max_rows() == 64);
  CHECK(description.pid() == static_cast<uint32_t>(zero.process().pid()));
  CHECK(description.loaded_bytes() == description.total_bytes());
  CHECK(description.checkpoint_digest() == one.Describe().checkpoint_digest());

  JoinBoth(zero, one, 1);
  v1::StepRequest request = PrefillStep(prompt);
  for (uint64_t step = 1; step <= 6; ++step) {
    zero.Send(request);
    one.Send(request);
    const v1::StepResponse answer = zero.Receive(), other = one.Receive();
    INFO(answer.error());
    REQUIRE(answer.error_code() == 0);
    REQUIRE(other.error_code() == 0);
    CHECK(answer.digest() == other.digest());
    CHECK(other.results_size() == 0);
    REQUIRE(answer.results_size() == 1);
    REQUIRE(answer.results(0).tokens_size() == 1);
    CHECK(answer.results(0).tokens(0) == greedy[step - 1]);
    request.clear_ops();
    request.clear_prefill();
    request.clear_verify();
    request.set_step(step + 1);
    v1::TreeVerify* verify = request.add_verify();
    verify->set_sequence_id(9);
    verify->set_start(static_cast<uint32_t>(prompt.size() + step - 1));
    verify->add_tokens(answer.results(0).tokens(0));
  }

  const std::string log = zero.Log(), mark = "metrics on 127.0.0.1:";
  REQUIRE(log.find(mark) != std::string::npos);
  const auto answer = testing::HttpGet(std::stoi(log.substr(log.find(mark) + mark.size())), "/metrics");
  INFO(answer.status());
  REQUIRE(answer.ok());
  const std::string& metrics = *answer;
  for (const char* line :
       {"kdt_worker_info{arch=", "kdt_worker_steps_total{rank=\"0\"} 6",
        "kdt_worker_load_seconds{rank=\"0\"}", "kdt_worker_rows_total{kind=\"prefill\",rank=\"0\"}",
        "kdt_worker_busy_seconds_total{phase=\"moe\",rank=\"0\"}",
        "kdt_worker_kv_slots{rank=\"0\",state=\"private\"}",
        "kdt_worker_kv_fragmentation_ratio{rank=\"0\"} 0",
        "kdt_worker_attention_error_ulps{of=\"row\",rank=\"0\"} 0.",
        "kdt_worker_attention_beyond_ulp_values_total{of=\"value\",rank=\"0\"} 0"}) {
    INFO(metrics);
    CHECK(metrics.find(line) != std::string::npos);
  }

  CHECK(metrics.find("kdt_worker_attention_checked_values_total{rank=\"0\"} 0\n") == std::string::npos);

  zero.process().Signal(SIGTERM);
  grpc::ClientContext context;
  v1::DrainRequest drain;
  drain.set_reason("no more work");
  v1::DrainResponse drained;
  CHECK(one.stub().Drain(&context, drain, &drained).ok());
  CHECK(drained.steps() == 6);
  for (Worker* worker : {&zero, &one}) {
    INFO(worker->Log());
    REQUIRE(worker->process().WaitEnded(15000));
    CHECK(worker->process().exit_status() == 0);
  }
  CHECK(one.process().TakeOutput().find("kdt-worker ends: its coordinator ended it: no more work\n") !=
        std::string::npos);
  CHECK(zero.Log().find("MB/s") != std::string::npos);
}

TEST_CASE("a killed worker is named by the other one, which goes on", "[worker]") {
  TempFolder folder;
  Worker zero(folder, 0, 2), one(folder, 1, 2);
  zero.Start();
  one.Start();
  JoinBoth(zero, one, 1);
  zero.Send(PrefillStep({5, 6, 7}));
  one.process().Signal(SIGKILL);
  const v1::StepResponse answer = zero.Receive();
  CHECK(answer.error_code() != 0);
  CHECK(answer.error().find("rank 1") != std::string::npos);
  CHECK(zero.Describe().epoch() == 0);
  Worker again(folder, 1, 2);
  again.Start();
  JoinBoth(zero, again, 2);
  CHECK(zero.Describe().epoch() == 2);
}

TEST_CASE("a bad flag is named and the status is 2", "[worker]") {
  TempFolder folder;
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"--rank=2", "--rank"},
      {"--tp=0", "--tp"},
      {"--backend=tpu", "--backend"},
      {"--kv_dtype=f16", "--kv_dtype"},
      {"--collective=nccl", "--collective"},
      {"--collective=fast", "--collective"},
      {"--device=-2", "--device"},
      {"--attention=slow", "--attention"},
      {"--validate_every=0", "--validate_every"},
      {"--max_rows=0", "--max_rows"},
      {"--listen=nowhere", "--listen"},
      {"--threads=0", "--threads"},
      {"--kv_slots=-1", "--kv_slots"},
      {"--kv_slots=1", "--kv_slots: 1 is too little"},
      {"--max_context=1", "--max_context: 1 is too little"},
      {"--model=", "--model"},
      {"--log_level=loud", "log_level"},
      // What would do nothing.
      {"--strict", "--strict"},
      {"--device=0", "--device"},
      {"--validate_every=8", "--validate_every"},
      {"--draft_window=64", "--draft_window"},
      {"--draft_rope_factor=2", "--draft_rope_factor"},
      {"--collective=ipc", "--collective"}};
  for (const auto& [flag, name] : cases) {
    Worker worker(folder, 0, 2, {flag});
    REQUIRE(worker.process().WaitEnded(kStartMs));
    INFO(flag);
    CHECK(worker.process().exit_status() == 2);
    CHECK(worker.Log().find(name) != std::string::npos);
    std::filesystem::remove(folder / "log0");
  }
}

TEST_CASE("a checkpoint that cannot be loaded is told and ends the process with status 1", "[worker]") {
  TempFolder folder;
  // A name that is not UTF-8: the message that tells it must be readable all the same.
  Worker worker(folder, 0, 1, {"--model=" + (folder / "nothing-here\xFF")});
  worker.Start(/*loaded=*/false);
  CHECK(WaitFor(
      [&] { return worker.Describe().load_error().find("nothing-here\uFFFD") != std::string::npos; }, 1000));
  REQUIRE(worker.process().WaitEnded(kStartMs));
  CHECK(worker.process().exit_status() == 1);
  CHECK(worker.Log().find("cannot load") != std::string::npos);
  // For the process that started it, on standard output.
  const std::string told = worker.process().TakeOutput();
  CHECK(told.find("kdt-worker ends: cannot load: ") == 0);
  CHECK(told.find("nothing-here") != std::string::npos);
}

TEST_CASE("SIGTERM while loading or joining ends with status 0", "[worker]") {
  TempFolder folder;
  Worker zero(folder, 0, 2), one(folder, 1, 2);
  zero.Start(/*loaded=*/false);
  zero.process().Signal(SIGTERM);
  one.Start();
  auto join = std::async(std::launch::async,
                         [&] { return one.Join(1, absl::StrCat("process-test-", getpid(), "-term")); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  one.process().Signal(SIGTERM);
  CHECK_FALSE(join.get().ok());
  for (Worker* worker : {&zero, &one}) {
    INFO(worker->Log());
    REQUIRE(worker->process().WaitEnded(kStartMs));
    CHECK(worker->process().exit_status() == 0);
  }
}

TEST_CASE("a worker that is to end when it is unused ends once its coordinator is gone", "[worker]") {
  TempFolder folder;
  Worker unused(folder, 0, 1);
  unused.Start();
  unused.process().Signal(kEndWhenUnused);
  CHECK(unused.process().WaitEnded(kStartMs));
  CHECK(unused.process().exit_status() == 0);

  Worker used(folder, 0, 1);
  used.Start();
  REQUIRE(used.Join(1, absl::StrCat("process-test-", getpid(), "-used")).ok());
  used.Send(PrefillStep({5, 6, 7}));
  CHECK(used.Receive().error_code() == 0);
  used.process().Signal(kEndWhenUnused);
  CHECK_FALSE(used.process().WaitEnded(3000));
  used.CloseStream();
  CHECK(used.process().WaitEnded(kStartMs));
  CHECK(used.process().exit_status() == 0);
}

TEST_CASE("with --die_with_parent a worker does not outlive the process that started it", "[worker]") {
  TempFolder folder;
  ChildProcess::Options options;
  options.name = "shell";
  options.capture_stdout = true;
  // The trailing command keeps the shell from replacing itself with the worker.
  options.argv = {"/bin/sh", "-c",
                  absl::StrCat(KDT_BIN_DIR "/kdt-worker --die_with_parent --model " KDT_GOLDENS_DIR
                                           "/model --listen unix:",
                               folder / "s", " 2>/dev/null & echo pid $!; wait; true")};
  auto shell = ChildProcess::Start(options);
  REQUIRE(shell.ok());
  const auto line = shell->WaitForLine("pid ", kStartMs);
  REQUIRE(line.ok());
  const pid_t worker = std::stoi(line->substr(4));
  REQUIRE(shell->WaitForLine(kReady, kStartMs).ok());
  CHECK(kill(worker, 0) == 0);
  shell->Signal(SIGKILL);
  CHECK(shell->WaitEnded(kStartMs));
  // Gone, or a zombie where nobody reaps orphans.
  CHECK(WaitFor([&] {
    const std::string status = ReadFile(absl::StrCat("/proc/", worker, "/status"));
    return status.empty() || status.find("State:\tZ") != std::string::npos;
  }));
}

}  // namespace
}  // namespace kdt
