#include "tests/bench/rank_bench/part_backend.h"

#include <chrono>
#include <string>
#include <utility>

#include "common/status.h"

namespace kdt::bench {
namespace {

using kernels::Graph;

class MarkedGraph final : public Graph {
 public:
  MarkedGraph(std::unique_ptr<Graph> inner, PartClock* clock, std::vector<std::pair<Part, cudaEvent_t>> marks)
      : inner_(std::move(inner)), clock_(clock), marks_(std::move(marks)) {}
  absl::Status Replay() override {
    if (!marks_.empty()) clock_->Replay(&marks_);
    return clock_->Around([this] { return inner_->Replay(); });
  }
  int64_t nodes() const override { return inner_->nodes(); }
  const std::vector<kernels::KernelUse>& kernel_uses() const override { return inner_->kernel_uses(); }

 private:
  std::unique_ptr<Graph> inner_;
  PartClock* clock_;
  std::vector<std::pair<Part, cudaEvent_t>> marks_;
};

class PartBackend final : public kernels::Backend {
 public:
  PartBackend(kernels::Backend* inner, PartClock* clock, ExpertTap* tap, double* prepare_seconds)
      : inner_(inner), clock_(clock), tap_(tap), prepare_seconds_(prepare_seconds) {}

  std::string name() const override { return inner_->name(); }
  std::string device_name() const override { return inner_->device_name(); }
  kernels::DeviceFacts facts() const override { return inner_->facts(); }
  std::optional<kernels::DeviceMemory> memory() const override { return inner_->memory(); }
  kernels::DType activation_dtype() const override { return inner_->activation_dtype(); }
  absl::StatusOr<void*> Allocate(size_t bytes) override { return inner_->Allocate(bytes); }
  void Free(void* data) override { inner_->Free(data); }
  absl::Status Upload(void* device, const void* host, size_t bytes) override {
    return inner_->Upload(device, host, bytes);
  }
  absl::Status Download(void* host, const void* device, size_t bytes) override {
    KDT_RETURN_IF_ERROR(clock_->Enter(Part::kNone));
    return inner_->Download(host, device, bytes);
  }
  absl::Status Synchronize() override {
    KDT_RETURN_IF_ERROR(clock_->Enter(Part::kNone));
    return inner_->Synchronize();
  }
  absl::StatusOr<void*> AllocateHost(size_t bytes) override { return inner_->AllocateHost(bytes); }
  void FreeHost(void* data) override { inner_->FreeHost(data); }
  absl::Status UploadAsync(void* device, const void* pinned, size_t bytes) override {
    return inner_->UploadAsync(device, pinned, bytes);
  }
  absl::Status DownloadAsync(void* pinned, const void* device, size_t bytes) override {
    KDT_RETURN_IF_ERROR(clock_->Enter(Part::kNone));
    return inner_->DownloadAsync(pinned, device, bytes);
  }
  bool can_capture() const override { return inner_->can_capture(); }
  absl::StatusOr<std::unique_ptr<Graph>> Capture(absl::FunctionRef<absl::Status()> record) override {
    clock_->BeginGraph();
    tap_->Begin();
    auto graph = inner_->Capture([&]() -> absl::Status {
      KDT_RETURN_IF_ERROR(record());
      return clock_->Enter(Part::kNone);
    });
    auto marks = clock_->EndGraph();
    if (!graph.ok()) return graph.status();
    return std::make_unique<MarkedGraph>(*std::move(graph), clock_, std::move(marks));
  }
  void* stream() const override { return inner_->stream(); }
  void Seal(bool sealed) override { inner_->Seal(sealed); }
  kernels::BackendStats stats() const override { return inner_->stats(); }

  absl::Status PrepareExperts(const kernels::Int4Experts& weights) override {
    KDT_RETURN_IF_ERROR(inner_->Synchronize());
    const auto start = std::chrono::steady_clock::now();
    KDT_RETURN_IF_ERROR(inner_->PrepareExperts(weights));
    KDT_RETURN_IF_ERROR(inner_->Synchronize());
    *prepare_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return absl::OkStatus();
  }

#define KDT_PART_OP(op, part)                               \
  absl::Status op(const kernels::op##Args& args) override { \
    KDT_RETURN_IF_ERROR(clock_->Enter(part));               \
    return inner_->op(args);                                \
  }
  KDT_PART_OP(Embedding, Part::kSmall)
  KDT_PART_OP(RmsNorm, Part::kSmall)
  KDT_PART_OP(Add, Part::kSmall)
  KDT_PART_OP(Rope, Part::kSmall)
  KDT_PART_OP(SiluMul, Part::kSmall)
  KDT_PART_OP(AbsorbQuery, Part::kAbsorb)
  KDT_PART_OP(MlaQuery, Part::kAbsorb)
  KDT_PART_OP(AbsorbValue, Part::kAbsorb)
  KDT_PART_OP(KvWrite, Part::kSmall)
  KDT_PART_OP(KvMove, Part::kSmall)
  KDT_PART_OP(TableWrite, Part::kSmall)
  KDT_PART_OP(ScaleRows, Part::kSampling)
  KDT_PART_OP(VerifyAttention, Part::kAttention)
  KDT_PART_OP(Compare, Part::kNone)
  KDT_PART_OP(DraftAttention, Part::kDraft)
  KDT_PART_OP(MlaPrepare, Part::kSmall)
  KDT_PART_OP(DraftPrepare, Part::kDraft)
  KDT_PART_OP(LogitsTopK, Part::kSampling)
  KDT_PART_OP(GumbelArgmax, Part::kSampling)
  KDT_PART_OP(TreeWalk, Part::kSampling)
  KDT_PART_OP(Router, Part::kRouter)
#undef KDT_PART_OP
  absl::Status Gemm(const kernels::GemmArgs& args) override {
    // The only one with another beside it: the router's scores and the shared experts' gate and up.
    KDT_RETURN_IF_ERROR(clock_->Enter(args.beside_w.rows > 0 ? Part::kRouter : Part::kGemm));
    return inner_->Gemm(args);
  }
  absl::Status Moe(const kernels::MoeArgs& args) override {
    KDT_RETURN_IF_ERROR(clock_->Enter(Part::kMoe));
    KDT_RETURN_IF_ERROR(inner_->Moe(args));
    if (!clock_->enabled()) return absl::OkStatus();
    KDT_RETURN_IF_ERROR(clock_->Enter(Part::kNone));
    return tap_->Take(*inner_, args.choice.expert_ids, args.x.rows * args.top_k);
  }
  absl::Status VerifyAttentionReference(const kernels::VerifyAttentionArgs& args) override {
    KDT_RETURN_IF_ERROR(clock_->Enter(Part::kNone));
    return inner_->VerifyAttentionReference(args);
  }

 private:
  kernels::Backend* inner_;
  PartClock* clock_;
  ExpertTap* tap_;
  double* prepare_seconds_;
};

class PartCollective final : public Collective {
 public:
  PartCollective(Collective* inner, PartClock* clock, int ranks)
      : inner_(inner), clock_(clock), missing_(ranks - inner->size()) {}
  std::string name() const override { return inner_->name(); }
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  absl::Status AllReduceSum(const kernels::Tensor& x) override {
    KDT_RETURN_IF_ERROR(clock_->Enter(Part::kCollective));
    return inner_->AllReduceSum(x);
  }
  absl::Status AllReduceNorm(kernels::Backend& backend, const kernels::RmsNormArgs& norm) override {
    KDT_RETURN_IF_ERROR(clock_->Enter(Part::kCollective));
    return inner_->AllReduceNorm(backend, norm);
  }
  absl::Status AllReduceNormGemm(kernels::Backend& backend, const kernels::RmsNormArgs& norm,
                                 const kernels::GemmArgs& gemm) override {
    return clock_->enabled() ? Collective::AllReduceNormGemm(backend, norm, gemm)
                             : inner_->AllReduceNormGemm(backend, norm, gemm);
  }
  absl::Status AllGather(const void* in, size_t bytes, void* out) override {
    KDT_RETURN_IF_ERROR(clock_->Enter(Part::kCollective));
    KDT_RETURN_IF_ERROR(inner_->AllGather(in, bytes, out));
    if (missing_ <= 0) return absl::OkStatus();
    // What a larger step left there would be taken for their answers.
    char* rest = static_cast<char*>(out) + static_cast<size_t>(inner_->size()) * bytes;
    const cudaError_t error =
        cudaMemsetAsync(rest, 0, static_cast<size_t>(missing_) * bytes, clock_->stream());
    return error == cudaSuccess ? absl::OkStatus() : absl::InternalError(cudaGetErrorString(error));
  }
  absl::Status Broadcast(void* data, size_t bytes, int root) override {
    return inner_->Broadcast(data, bytes, root);
  }
  absl::Status Finish(kernels::Backend& backend) override {
    KDT_RETURN_IF_ERROR(clock_->Enter(Part::kNone));
    return inner_->Finish(backend);
  }
  absl::Status Probe() override { return inner_->Probe(); }
  void SetDeadline(absl::Time deadline) override { inner_->SetDeadline(deadline); }
  void Abort() override { inner_->Abort(); }
  int64_t wait_ns() const override { return inner_->wait_ns(); }

 private:
  Collective* inner_;
  PartClock* clock_;
  int missing_;
};

}  // namespace

std::unique_ptr<kernels::Backend> MakePartBackend(kernels::Backend* inner, PartClock* clock, ExpertTap* tap,
                                                  double* prepare_seconds) {
  return std::make_unique<PartBackend>(inner, clock, tap, prepare_seconds);
}
std::unique_ptr<Collective> MakePartCollective(Collective* inner, PartClock* clock, int ranks) {
  return std::make_unique<PartCollective>(inner, clock, ranks);
}

}  // namespace kdt::bench
