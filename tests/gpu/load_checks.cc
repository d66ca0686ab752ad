// Full pools, batches over the largest bucket, long runs.
#include <chrono>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "tests/gpu/checks.h"

namespace kdt::testing {
namespace {

constexpr int64_t kSmallPool = 640;  // slots

nlohmann::json NewResult() { return {{"ok", false}, {"failures", nlohmann::json::array()}}; }

v1::ClusterInfo Info(ServedGroup& group) {
  v1::ClusterInfo info;
  grpc::ClientContext context;
  group.stub().GetClusterInfo(&context, {}, &info);
  return info;
}

// Resident bytes of all workers together.
int64_t WorkersResident(const ServedGroup& group) {
  int64_t total = 0;
  for (const pid_t pid : group.WorkerPids()) {
    std::ifstream file(absl::StrCat("/proc/", pid, "/status"));
    for (std::string line; std::getline(file, line);) {
      if (line.rfind("VmRSS:", 0) == 0) total += std::stoll(line.substr(6)) * 1024;
    }
  }
  return total;
}

// Bytes in use on all GPUs, by any process; nothing without a GPU.
std::optional<int64_t> GpuMemoryUsed() {
  const auto dir = MakeTempDir("kdt-smi-");
  if (!dir.ok()) return std::nullopt;
  ChildProcess::Options process;
  process.name = "nvidia-smi";
  process.argv = {"/bin/sh", "-c",
                  absl::StrCat("nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits > ", *dir,
                               "/out 2>/dev/null")};
  auto child = ChildProcess::Start(process);
  std::optional<int64_t> total;
  if (child.ok() && child->WaitEnded(10000) && child->exit_status() == 0) {
    std::ifstream file(*dir + "/out");
    for (int64_t mib = 0; file >> mib;) total = total.value_or(0) + (mib << 20);
  }
  RemoveTree(*dir);
  return total;
}

nlohmann::json Memory(const ServedGroup& group) {
  const auto gpu = GpuMemoryUsed();
  return {{"workers_resident_bytes", WorkersResident(group)},
          {"gpu_used_bytes", gpu.has_value() ? nlohmann::json(*gpu) : nlohmann::json()}};
}

// Runs requests against a group with more flags and compares them.
nlohmann::json CheckStreams(const std::string& name, const CheckOptions& options, ServedGroup& group,
                            const Reference& reference, size_t count, const char* speculation,
                            size_t concurrency) {
  nlohmann::json result = NewResult();
  const auto requests = PlanRequests(reference.stub(), options.prompts_file, count, options.tokens, 7000);
  const auto setting = ParseSpeculation(speculation);
  if (!requests.ok()) {
    result["failures"].push_back(requests.status().ToString());
    return result;
  }
  const std::vector<Stream> expected = reference.Run(*requests);
  const std::vector<Stream> got = RunStreams(group.stub(), *requests, *setting, concurrency, 0);
  Comparison comparison;
  Compare(*requests, expected, got, reference.probe(), &comparison);
  result["streams"] = Report(name, comparison, options.tolerance, &result["failures"]);
  return result;
}

}  // namespace

nlohmann::json CheckFullPool(const CheckOptions& options, const Reference& reference) {
  ServedGroupOptions subject = options.subject;
  subject.flags.insert(subject.flags.begin(), absl::StrCat("--kv_slots=", kSmallPool));
  const auto group = ServedGroup::Start(subject);
  if (!group.ok()) {
    nlohmann::json result = NewResult();
    result["failures"].push_back(group.status().ToString());
    return result;
  }
  nlohmann::json result = CheckStreams(absl::StrCat("tp ", subject.tp, ", full pool"), options, **group,
                                       reference, 48, "tree 16", 48);
  // One that can never fit.
  v1::GenerateRequest request;
  for (int64_t i = 0; i < kSmallPool + 100; ++i) request.mutable_token_ids()->add_ids(65 + i % 20);
  request.mutable_stop()->set_max_tokens(10);
  grpc::ClientContext context;
  auto reader = (*group)->stub().Generate(&context, request);
  v1::GenerateResponse response;
  while (reader->Read(&response)) {
  }
  const grpc::Status status = reader->Finish();
  result["refusal"] = absl::StrCat(static_cast<int>(status.error_code()), " ", status.error_message());
  std::printf("  refused: %s\n", result["refusal"].get<std::string>().c_str());
  if (status.error_code() != grpc::StatusCode::INVALID_ARGUMENT &&
      status.error_code() != grpc::StatusCode::RESOURCE_EXHAUSTED) {
    result["failures"].push_back("a prompt larger than the pool was not refused");
  }
  if (!Info(**group).serving()) result["failures"].push_back("the group does not serve any more");
  result["ok"] = result["failures"].empty();
  return result;
}

nlohmann::json CheckLargeBatch(const CheckOptions& options, const Reference& reference) {
  ServedGroupOptions subject = options.subject;
  subject.flags.insert(subject.flags.begin(), "--max_rows=256");
  const auto group = ServedGroup::Start(subject);
  if (!group.ok()) {
    nlohmann::json result = NewResult();
    result["failures"].push_back(group.status().ToString());
    return result;
  }
  // 32 trees of up to 65 rows, and prompts of up to 160: far more than 256 rows wait for each step.
  nlohmann::json result = CheckStreams(absl::StrCat("tp ", subject.tp, ", large batch"), options, **group,
                                       reference, 64, "tree 64", 32);
  result["ok"] = result["failures"].empty();
  return result;
}

nlohmann::json CheckSoak(const CheckOptions& options, const Reference& reference) {
  nlohmann::json result = NewResult();
  const auto group = ServedGroup::Start(options.subject);
  if (!group.ok()) {
    result["failures"].push_back(group.status().ToString());
    return result;
  }
  const auto setting = ParseSpeculation("tree 16");
  const auto started = std::chrono::steady_clock::now();
  uint64_t steps = 0, round = 0, tokens = 0, drafted = 0, accepted = 0;
  nlohmann::json before;
  while (steps < options.soak_steps) {
    const auto requests = PlanRequests(reference.stub(), options.prompts_file, options.requests,
                                       options.tokens, 20000 + round * options.requests);
    if (!requests.ok()) break;
    for (const Stream& stream : RunStreams((*group)->stub(), *requests, *setting, 8, 0)) {
      tokens += stream.tokens.size();
      drafted += stream.drafted;
      accepted += stream.accepted;
      if (!stream.error.empty()) result["failures"].push_back(stream.error);
    }
    if (!result["failures"].empty()) break;
    const v1::ClusterInfo info = Info(**group);
    steps = info.ranks_size() > 0 ? info.ranks(0).steps() : steps;
    // Caches and arenas have their size behind the first rounds.
    if (++round == 2) before = Memory(**group);
  }
  const nlohmann::json behind = Memory(**group);
  result["before"] = before;
  result["behind"] = behind;
  result["steps"] = steps;
  result["tokens"] = tokens;
  result["drafted"] = drafted;
  result["accepted"] = accepted;
  result["seconds"] = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  std::printf(
      "tp %d, soak: %llu steps, %llu tokens, %llu drafted, %llu accepted, %.1f s; workers and GPU before %s, "
      "behind %s\n",
      options.subject.tp, static_cast<unsigned long long>(steps), static_cast<unsigned long long>(tokens),
      static_cast<unsigned long long>(drafted), static_cast<unsigned long long>(accepted),
      result["seconds"].get<double>(), before.dump().c_str(), behind.dump().c_str());
  if (!options.subject.drafter.empty() && accepted == 0) {
    result["failures"].push_back("no drafted token was accepted: drafting was not exercised");
  }
  result["ok"] = result["failures"].empty();
  return result;
}

}  // namespace kdt::testing
