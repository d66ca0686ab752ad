// What a step costs apart from the model: coordinator, serialisation, streams, one small reduction between
// the ranks.
//
// Real parts all the way (scheduler, tree building, group, worker service and engine thread in processes of
// their own, shared-memory collective); only the engine does no work. So the period of steps is coordinator +
// transport.
//   step_transport_bench --ranks 8 --nodes 64 --sequences 1
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/time/time.h"
#include "common/clock.h"
#include "common/flags.h"
#include "common/log.h"
#include "common/process.h"
#include "common/status.h"
#include "coordinator/group/rank_group.h"
#include "coordinator/scheduler/scheduler.h"
#include "worker/collective/collective.h"
#include "worker/engine/engine.h"
#include "worker/service/worker_service.h"

ABSL_FLAG(int, ranks, 8, "worker processes");
ABSL_FLAG(int, nodes, 64, "drafted nodes a tree; 0: plain decoding");
ABSL_FLAG(int, depth, 7, "drafted positions (block size - 1)");
ABSL_FLAG(int, top_k, 64, "guesses a position");
ABSL_FLAG(int, accepted, 3, "nodes accepted in each round");
ABSL_FLAG(int, sequences, 1, "requests at once");
ABSL_FLAG(int, tokens, 12000, "tokens of each request");
ABSL_FLAG(std::string, tokenizer, KDT_GOLDENS_DIR "/model", "folder with a tokenizer");

namespace kdt {
namespace {

constexpr uint32_t kVocab = 1024;
constexpr uint32_t kSlots = 1 << 20;

// Takes every step, accepts a fixed number of nodes along a path, and drafts again. All ranks meet in one
// reduction.
class IdleEngine : public Engine {
 public:
  absl::Status StartEpoch(Collective* collective) override {
    collective_ = collective;
    return absl::OkStatus();
  }
  absl::Status Step(const v1::StepRequest& request, v1::StepResponse* response) override {
    const int64_t start_us = MonotonicMicros();
    float value = 1;
    KDT_RETURN_IF_ERROR(collective_->AllReduceSum(kernels::MakeTensor(&value, kernels::DType::kF32, 1, 1)));
    response->set_epoch(request.epoch());
    response->set_step(request.step());
    response->set_rank(static_cast<uint32_t>(collective_->rank()));
    response->set_digest(request.step());
    response->mutable_pool()->set_slots_used(CountSlots(request));
    if (collective_->rank() == 0) {
      for (const auto& chunk : request.prefill()) {
        if (chunk.sample()) Answer(chunk.sequence_id(), {}, chunk.draft_top_k(), response->add_results());
      }
      for (const auto& tree : request.verify()) {
        Answer(tree.sequence_id(), Path(tree), tree.draft_top_k(), response->add_results(), &tree);
      }
    }
    response->mutable_timings()->set_total_us(static_cast<float>(MonotonicMicros() - start_us));
    return absl::OkStatus();
  }
  void Describe(v1::DescribeResponse* response) const override {
    response->set_checkpoint_digest("idle");
    response->set_kv_slots_total(kSlots);
    response->set_max_rows(1024);
    response->set_max_tree_nodes(256);
    response->set_max_sequences(64);
    response->set_draft_block_size(static_cast<uint32_t>(absl::GetFlag(FLAGS_depth)) + 1);
    response->set_max_draft_top_k(static_cast<uint32_t>(absl::GetFlag(FLAGS_top_k)));
    response->set_ready(true);
  }

 private:
  // Slots in use as a real pool would have them; the coordinator compares this with its own count.
  uint64_t CountSlots(const v1::StepRequest& request) {
    for (const auto& op : request.ops()) {
      if (op.has_fork()) own_begin_[op.fork().sequence_id()] = op.fork().length();
      if (op.has_free()) own_end_.erase(op.free().sequence_id());
    }
    for (const auto& chunk : request.prefill()) {
      own_end_[chunk.sequence_id()] = chunk.start() + static_cast<uint64_t>(chunk.tokens_size());
    }
    for (const auto& tree : request.verify())
      own_end_[tree.sequence_id()] = tree.start() + 1 + Path(tree).size();
    uint64_t used = 0;
    for (const auto& [id, end] : own_end_) used += end - own_begin_[id];
    return used;
  }
  static std::vector<uint32_t> Path(const v1::TreeVerify& tree) {
    std::vector<uint32_t> path;
    uint32_t node = 0;
    for (uint32_t i = 1; i < static_cast<uint32_t>(tree.tokens_size()); ++i) {
      if (static_cast<int>(path.size()) == absl::GetFlag(FLAGS_accepted)) break;
      if (tree.parents(static_cast<int>(i) - 1) != node) continue;
      path.push_back(i);
      node = i;
    }
    return path;
  }
  void Answer(uint64_t id, const std::vector<uint32_t>& path, uint32_t k, v1::SequenceResult* result,
              const v1::TreeVerify* tree = nullptr) {
    result->set_sequence_id(id);
    for (const uint32_t node : path) {
      result->add_accepted_nodes(node);
      result->add_tokens(tree->tokens(static_cast<int>(node)));
    }
    result->add_tokens(Token());
    if (k == 0) return;
    v1::DraftTopK* draft = result->mutable_draft();
    draft->set_k(k);
    for (int position = 0; position < absl::GetFlag(FLAGS_depth); ++position) {
      for (uint32_t i = 0; i < k; ++i) {
        draft->add_token_ids(Token());
        draft->add_log_probs(-0.3F * static_cast<float>(position + 1) - 0.35F * static_cast<float>(i));
      }
    }
  }
  uint32_t Token() { return 200 + (token_ = token_ * 1664525 + 1013904223) % 500; }
  std::map<uint64_t, uint64_t> own_begin_, own_end_;  // by sequence: its positions in slots of its own
  Collective* collective_ = nullptr;
  uint32_t token_ = 1;
};

int RunRank(int rank, int ranks, const std::string& address) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  EngineThread engine(
      rank, ranks,
      [](const v1::JoinGroupRequest& request, const std::atomic<bool>* cancelled) {
        return MakeShmCollective(request.collective_id(), static_cast<int>(request.rank()),
                                 static_cast<int>(request.tp()), 1 << 20, absl::Seconds(20), cancelled);
      },
      nullptr);
  engine.SetEngine(std::make_unique<IdleEngine>());
  WorkerService service({rank, ranks, "idle", "none"}, &engine, [](const std::string&) {});
  grpc::ServerBuilder builder;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials());
  ConfigureWorkerServer(&builder);
  builder.RegisterService(&service);
  const auto server = builder.BuildAndStart();
  if (server == nullptr) return 1;
  server->Wait();
  return 0;
}

// Notes when each chunk comes.
class TimingSink : public RequestSink {
 public:
  bool Push(v1::GenerateResponse&& response) override {
    if (response.has_chunk()) times_us.push_back(MonotonicMicros());
    return true;
  }
  void End(const absl::Status& status) override {
    const std::lock_guard lock(mutex);
    end = status;
    done = true;
    changed.notify_all();
  }
  void Wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return done; });
  }
  std::vector<int64_t> times_us;
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  absl::Status end;
};

double Percentile(std::vector<int64_t> values, double share) {
  std::sort(values.begin(), values.end());
  return static_cast<double>(values[static_cast<size_t>(share * static_cast<double>(values.size() - 1))]);
}

absl::Status Measure(const std::vector<std::string>& addresses) {
  std::atomic<Scheduler*> to_wake{nullptr};
  RankGroupOptions group_options;
  group_options.addresses = addresses;
  group_options.on_change = [&] {
    if (Scheduler* scheduler = to_wake; scheduler != nullptr) scheduler->Wake();
  };
  RankGroup group(group_options);
  SchedulerOptions options;
  options.vocab_size = kVocab;
  options.speculation.budget = static_cast<uint32_t>(absl::GetFlag(FLAGS_nodes));
  KDT_ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::Load(absl::GetFlag(FLAGS_tokenizer)));
  Scheduler scheduler(options, &group, TextTools{tokenizer, std::nullopt});
  to_wake = &scheduler;
  group.Form();
  while (group.state() == GroupState::kJoining) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  if (group.state() != GroupState::kServing) return absl::UnavailableError(group.reason());
  scheduler.Start();

  std::vector<std::shared_ptr<TimingSink>> sinks;
  for (int i = 0; i < absl::GetFlag(FLAGS_sequences); ++i) {
    RequestSpec spec;
    spec.request_id = "bench";
    spec.prompt = {1, 2, 3, static_cast<uint32_t>(i)};
    spec.sampling.set_prompt_length(4);
    spec.max_tokens = static_cast<uint32_t>(absl::GetFlag(FLAGS_tokens));
    sinks.push_back(std::make_shared<TimingSink>());
    KDT_RETURN_IF_ERROR(scheduler.Submit(std::move(spec), sinks.back()).status());
  }
  for (const auto& sink : sinks) sink->Wait();
  KDT_RETURN_IF_ERROR(sinks[0]->end);
  const auto& times = sinks[0]->times_us;
  std::vector<int64_t> periods;
  for (size_t i = times.size() / 10 + 1; i < times.size(); ++i) periods.push_back(times[i] - times[i - 1]);
  std::printf("%d ranks, %d sequences, trees of %d nodes (depth %d, top-k %d), %zu steps on %u cores:\n",
              absl::GetFlag(FLAGS_ranks), absl::GetFlag(FLAGS_sequences), absl::GetFlag(FLAGS_nodes),
              absl::GetFlag(FLAGS_depth), absl::GetFlag(FLAGS_top_k), periods.size(),
              std::thread::hardware_concurrency());
  std::printf("coordinator + transport per step: p10 %.0f us, median %.0f us, p90 %.0f us, p99 %.0f us\n",
              Percentile(periods, 0.1), Percentile(periods, 0.5), Percentile(periods, 0.9),
              Percentile(periods, 0.99));
  scheduler.Stop();
  return absl::OkStatus();
}

int Main() {
  const auto dir = MakeTempDir("kdt-bench-");
  if (!dir.ok()) return 1;
  const int ranks = absl::GetFlag(FLAGS_ranks);
  std::vector<std::string> addresses;
  std::vector<pid_t> children;
  // Forked before gRPC has any threads.
  for (int rank = 0; rank < ranks; ++rank) {
    addresses.push_back("unix:" + *dir + "/rank" + std::to_string(rank));
    const pid_t child = fork();
    if (child == 0) _exit(RunRank(rank, ranks, addresses.back()));
    children.push_back(child);
  }
  const absl::Status status = Measure(addresses);
  if (!status.ok()) std::printf("failed: %s\n", std::string(status.message()).c_str());
  for (const pid_t child : children) kill(child, SIGKILL);
  for (const pid_t child : children) waitpid(child, nullptr, 0);
  RemoveTree(*dir);
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace kdt

int main(int argc, char** argv) {
  kdt::ParseFlags(argc, argv, "measures coordinator and transport per step");
  kdt::InitLogging("bench", "warn").IgnoreError();
  return kdt::Main();
}
