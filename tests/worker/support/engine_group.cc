#include "tests/worker/support/engine_group.h"

#include <unistd.h>

#include <atomic>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace kdt::testing {
namespace {

constexpr size_t kCollectiveBytes = 1 << 18;
constexpr uint32_t kDeadlineMs = 30000;

// Takes device memory through the host, waiting for the device every time: good for several ranks of a test
// on one GPU, and for nothing else. It cannot be captured.
class StagedCollective final : public Collective {
 public:
  StagedCollective(std::unique_ptr<Collective> host, kernels::Backend* backend)
      : host_(std::move(host)), backend_(backend) {}
  std::string name() const override { return "staged"; }
  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }
  absl::Status AllReduceSum(const kernels::Tensor& x) override {
    kernels::Tensor staged = x;
    const size_t bytes = x.rows * x.cols * kernels::DTypeSize(x.dtype);
    in_.resize(bytes);
    staged.data = in_.data();
    KDT_RETURN_IF_ERROR(backend_->Download(in_.data(), x.data, bytes));
    KDT_RETURN_IF_ERROR(host_->AllReduceSum(staged));
    return backend_->Upload(x.data, in_.data(), bytes);
  }
  absl::Status AllGather(const void* in, size_t bytes, void* out) override {
    in_.resize(bytes);
    out_.resize(bytes * size());
    KDT_RETURN_IF_ERROR(backend_->Download(in_.data(), in, bytes));
    KDT_RETURN_IF_ERROR(host_->AllGather(in_.data(), bytes, out_.data()));
    return backend_->Upload(out, out_.data(), bytes * size());
  }
  absl::Status Broadcast(void* data, size_t bytes, int root) override {
    in_.resize(bytes);
    KDT_RETURN_IF_ERROR(backend_->Download(in_.data(), data, bytes));
    KDT_RETURN_IF_ERROR(host_->Broadcast(in_.data(), bytes, root));
    return backend_->Upload(data, in_.data(), bytes);
  }
  absl::Status Probe() override { return host_->Probe(); }
  void SetDeadline(absl::Time deadline) override { host_->SetDeadline(deadline); }
  void Abort() override { host_->Abort(); }
  int64_t wait_ns() const override { return host_->wait_ns(); }

 private:
  std::unique_ptr<Collective> host_;
  kernels::Backend* backend_;
  std::vector<char> in_, out_;
};

}  // namespace

absl::Status EngineGroup::OnAllRanks(const std::function<absl::Status(int)>& body) {
  std::vector<absl::Status> results(ranks_.size());
  std::vector<std::thread> threads;
  for (size_t rank = 1; rank < ranks_.size(); ++rank) {
    threads.emplace_back([&, rank] { results[rank] = body(static_cast<int>(rank)); });
  }
  results[0] = body(0);
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& result : results) KDT_RETURN_IF_ERROR(result);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<EngineGroup>> EngineGroup::Start(EngineOptions options, int tp,
                                                                EngineObserver* observer,
                                                                const BackendMaker& make_backend) {
  static std::atomic<int> counter = 0;
  const std::string id = absl::StrCat("engine-test-", getpid(), "-", ++counter);
  auto group = std::make_unique<EngineGroup>();
  group->ranks_.resize(tp);
  KDT_RETURN_IF_ERROR(group->OnAllRanks([&](int r) -> absl::Status {
    Rank& rank = group->ranks_[r];
    EngineOptions mine = options;
    mine.rank = r;
    mine.tp = tp;
    mine.observer = r == 0 ? observer : nullptr;
    KDT_ASSIGN_OR_RETURN(rank.backend, make_backend == nullptr ? kernels::MakeCpuBackend(1) : make_backend());
    const bool staged = tp > 1 && rank.backend->name() != "cpu";
    if (staged && mine.step_mode == StepMode::kAuto) mine.step_mode = StepMode::kEager;
    KDT_ASSIGN_OR_RETURN(rank.engine, Engine::Load(mine, rank.backend.get(), nullptr));
    if (tp == 1) {
      rank.collective = MakeLocalCollective();
    } else {
      KDT_ASSIGN_OR_RETURN(rank.collective,
                           MakeShmCollective(id, r, tp, kCollectiveBytes, absl::Seconds(20)));
      if (staged) {
        rank.collective = std::make_unique<StagedCollective>(std::move(rank.collective), rank.backend.get());
      }
    }
    return rank.engine->StartEpoch(rank.collective.get());
  }));
  return group;
}

void EngineGroup::Restart() {
  const absl::Status started =
      OnAllRanks([&](int r) { return ranks_[r].engine->StartEpoch(ranks_[r].collective.get()); });
  KDT_CHECK(started.ok());
  next_step_ = 1;
}

absl::StatusOr<v1::StepResponse> EngineGroup::Step(v1::StepRequest request) {
  request.set_step(next_step_);
  request.set_deadline_ms(kDeadlineMs);
  std::vector<v1::StepResponse> responses(ranks_.size());
  KDT_RETURN_IF_ERROR(OnAllRanks([&](int r) { return ranks_[r].engine->Step(request, &responses[r]); }));
  ++next_step_;
  for (const v1::StepResponse& response : responses) {
    if (response.digest() != responses[0].digest()) {
      return absl::DataLossError(absl::StrCat("rank ", response.rank(), "'s digest differs"));
    }
  }
  return responses[0];
}

EngineOptions GoldenOptions(bool with_drafter) {
  EngineOptions options;
  options.model_dir = std::string(KDT_GOLDENS_DIR) + "/model";
  if (with_drafter) options.drafter_dir = std::string(KDT_GOLDENS_DIR) + "/drafter";
  options.kv_slots = 2048;
  options.max_rows = 512;
  options.max_sequences = 32;
  options.max_context = 1024;
  return options;
}

v1::SamplingState GreedySampling(uint32_t prompt_length) {
  v1::SamplingState sampling;
  sampling.set_temperature(0);
  sampling.set_top_p(1);
  sampling.set_repetition_penalty(1);
  sampling.set_prompt_length(prompt_length);
  return sampling;
}

void AddCreate(v1::StepRequest* request, uint64_t id, const v1::SamplingState& sampling) {
  v1::CreateSequence* create = request->add_ops()->mutable_create();
  create->set_sequence_id(id);
  create->set_expected_tokens(64);
  *create->mutable_sampling() = sampling;
}

void AddFork(v1::StepRequest* request, uint64_t id, uint64_t parent, uint32_t length,
             const v1::SamplingState& sampling) {
  v1::ForkSequence* fork = request->add_ops()->mutable_fork();
  fork->set_sequence_id(id);
  fork->set_parent_id(parent);
  fork->set_length(length);
  fork->set_expected_tokens(64);
  *fork->mutable_sampling() = sampling;
}

void AddFree(v1::StepRequest* request, uint64_t id) {
  request->add_ops()->mutable_free()->set_sequence_id(id);
}

v1::PrefillChunk* AddChunk(v1::StepRequest* request, uint64_t id, uint32_t start,
                           const std::vector<int32_t>& tokens) {
  v1::PrefillChunk* chunk = request->add_prefill();
  chunk->set_sequence_id(id);
  chunk->set_start(start);
  chunk->mutable_tokens()->Add(tokens.begin(), tokens.end());
  return chunk;
}

v1::PrefillChunk* AddPrompt(v1::StepRequest* request, uint64_t id, const v1::SamplingState& sampling,
                            const std::vector<int32_t>& tokens) {
  AddCreate(request, id, sampling);
  v1::PrefillChunk* chunk = AddChunk(request, id, 0, tokens);
  chunk->set_sample(true);
  return chunk;
}

v1::TreeVerify* AddTree(v1::StepRequest* request, uint64_t id, uint32_t start,
                        const std::vector<int32_t>& tokens, const std::vector<int32_t>& parents) {
  v1::TreeVerify* tree = request->add_verify();
  tree->set_sequence_id(id);
  tree->set_start(start);
  tree->mutable_tokens()->Add(tokens.begin(), tokens.end());
  tree->mutable_parents()->Add(parents.begin(), parents.end());
  return tree;
}

}  // namespace kdt::testing
