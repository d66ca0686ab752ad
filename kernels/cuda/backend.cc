// The CUDA backend: memory, copies, and the ops of ops.h on one stream.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kdt/kernels/cuda_backend.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/graph.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/ops.h"

namespace kdt::kernels {
namespace {

std::string Uuid(const cudaUUID_t& uuid) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    absl::StrAppendFormat(&text, "%02x", static_cast<unsigned char>(uuid.bytes[i]));
  }
  return text;
}

class CudaBackend final : public Backend {
 public:
  static absl::StatusOr<std::unique_ptr<Backend>> Make(const CudaBackendOptions& options) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess) devices = 0;
    if (options.device < 0 || options.device >= devices) {
      return absl::NotFoundError(
          absl::StrCat("cuda backend: no device ", options.device, ", there are ", devices));
    }
    KDT_CUDA_RETURN_IF_ERROR(cudaSetDevice(options.device));
    cudaDeviceProp properties;
    KDT_CUDA_RETURN_IF_ERROR(cudaGetDeviceProperties(&properties, options.device));
    const int arch = properties.major * 10 + properties.minor;
    if (arch != 90 && arch != 120) {
      return absl::FailedPreconditionError(absl::StrCat("cuda backend: ", properties.name, " is sm_", arch,
                                                        ", this build has code for sm_90 and sm_120"));
    }
    auto backend = std::make_unique<CudaBackend>();
    backend->device_ = options.device;
    backend->device_name_ = properties.name;
    backend->facts_ = {absl::StrCat("sm_", arch), Uuid(properties.uuid),
                       absl::StrFormat("%08X:%02X:%02X.0", properties.pciDomainID, properties.pciBusID,
                                       properties.pciDeviceID)};
    backend->launch_.processors = properties.multiProcessorCount;
    backend->launch_.workspace_bytes = options.workspace_bytes / 256 * 256;
    KDT_CUDA_RETURN_IF_ERROR(cudaStreamCreateWithFlags(&backend->launch_.stream, cudaStreamNonBlocking));
    backend->memory_.SetStream(backend->launch_.stream);
    absl::StatusOr<void*> workspace = backend->Allocate(backend->launch_.workspace_bytes);
    if (!workspace.ok()) return workspace.status();
    backend->launch_.workspace = *workspace;
    absl::StatusOr<void*> counters = backend->Allocate(cuda::kAllCounters * sizeof(unsigned));
    if (!counters.ok()) return counters.status();
    backend->launch_.counters = static_cast<unsigned*>(*counters);
    return backend;
  }

  // Errors on the way down have no one to go to.
  ~CudaBackend() override {
    Free(launch_.counters);
    Free(launch_.workspace);
    if (launch_.stream != nullptr) (void)cudaStreamDestroy(launch_.stream);
  }

  std::string name() const override { return "cuda"; }
  std::string device_name() const override { return device_name_; }
  DeviceFacts facts() const override { return facts_; }
  std::optional<DeviceMemory> memory() const override {
    Bind();
    size_t free = 0, total = 0;
    if (cudaMemGetInfo(&free, &total) != cudaSuccess) return std::nullopt;
    return DeviceMemory{total - free, total};
  }
  DType activation_dtype() const override { return DType::kBF16; }

  absl::StatusOr<void*> Allocate(size_t bytes) override {
    Bind();
    return memory_.Allocate(bytes);
  }
  void Free(void* data) override { memory_.Free(data); }
  absl::StatusOr<void*> AllocateHost(size_t bytes) override { return memory_.AllocateHost(bytes); }
  void FreeHost(void* data) override { memory_.FreeHost(data); }
  absl::Status Upload(void* device, const void* host, size_t bytes) override {
    return memory_.Upload(device, host, bytes);
  }
  absl::Status Download(void* host, const void* device, size_t bytes) override {
    return memory_.Download(host, device, bytes);
  }
  absl::Status UploadAsync(void* device, const void* pinned, size_t bytes) override {
    return Copy("UploadAsync", device, pinned, bytes);
  }
  absl::Status DownloadAsync(void* pinned, const void* device, size_t bytes) override {
    return Copy("DownloadAsync", pinned, device, bytes);
  }
  absl::Status Synchronize() override { return memory_.Synchronize(); }

  bool can_capture() const override { return true; }
  absl::StatusOr<std::unique_ptr<Graph>> Capture(absl::FunctionRef<absl::Status()> record) override {
    Bind();
    capturing_ = true;
    absl::StatusOr<std::unique_ptr<Graph>> graph =
        cuda::CaptureGraph(launch_.stream, record, &memory_.stats().replays);
    capturing_ = false;
    return graph;
  }
  void* stream() const override { return launch_.stream; }
  void Seal(bool sealed) override { memory_.Seal(sealed); }
  BackendStats stats() const override { return memory_.stats(); }

  absl::Status Embedding(const EmbeddingArgs& args) override {
    return Do("embedding", cuda::Embedding, args);
  }
  absl::Status RmsNorm(const RmsNormArgs& args) override { return Do("rms_norm", cuda::RmsNorm, args); }
  absl::Status Add(const AddArgs& args) override { return Do("add", cuda::Add, args); }
  absl::Status Rope(const RopeArgs& args) override { return Do("rope", cuda::Rope, args); }
  absl::Status Gemm(const GemmArgs& args) override { return Do("gemm", cuda::Gemm, args); }
  absl::Status SiluMul(const SiluMulArgs& args) override { return Do("silu_mul", cuda::SiluMul, args); }
  absl::Status MlaPrepare(const MlaPrepareArgs& args) override {
    return Do("mla_prepare", cuda::MlaPrepare, args);
  }
  absl::Status MlaQuery(const MlaQueryArgs& args) override { return Do("mla_query", cuda::MlaQuery, args); }
  absl::Status AbsorbQuery(const AbsorbQueryArgs& args) override {
    return Do("absorb_query", cuda::AbsorbQuery, args);
  }
  absl::Status AbsorbValue(const AbsorbValueArgs& args) override {
    return Do("absorb_value", cuda::AbsorbValue, args);
  }
  absl::Status KvWrite(const KvWriteArgs& args) override { return Do("kv_write", cuda::KvWrite, args); }
  absl::Status KvMove(const KvMoveArgs& args) override { return Do("kv_move", cuda::KvMove, args); }
  absl::Status TableWrite(const TableWriteArgs& args) override {
    return Do("table_write", cuda::TableWrite, args);
  }
  absl::Status VerifyAttention(const VerifyAttentionArgs& args) override {
    return Do("verify_attention", cuda::VerifyAttention, args);
  }
  absl::Status VerifyAttentionReference(const VerifyAttentionArgs& args) override {
    return Do("verify_attention_reference", cuda::VerifyAttentionReference, args);
  }
  absl::Status Compare(const CompareArgs& args) override { return Do("compare", cuda::Compare, args); }
  absl::Status DraftPrepare(const DraftPrepareArgs& args) override {
    return Do("draft_prepare", cuda::DraftPrepare, args);
  }
  absl::Status DraftAttention(const DraftAttentionArgs& args) override {
    return Do("draft_attention", cuda::DraftAttention, args);
  }
  absl::Status Router(const RouterArgs& args) override { return Do("router", cuda::Router, args); }
  absl::Status PrepareExperts(const Int4Experts& weights) override {
    return Do("prepare_experts", cuda::OrderExperts, weights);
  }
  absl::Status Moe(const MoeArgs& args) override { return Do("moe", cuda::Moe, args); }
  absl::Status LogitsTopK(const LogitsTopKArgs& args) override {
    return Do("logits_top_k", cuda::LogitsTopK, args);
  }
  absl::Status ScaleRows(const ScaleRowsArgs& args) override {
    return Do("scale_rows", cuda::ScaleRows, args);
  }
  absl::Status GumbelArgmax(const GumbelArgmaxArgs& args) override {
    return Do("gumbel_argmax", cuda::GumbelArgmax, args);
  }
  absl::Status TreeWalk(const TreeWalkArgs& args) override { return Do("tree_walk", cuda::TreeWalk, args); }

 private:
  // What a thread allocates and launches goes to the device it is bound to, which is the first one at its
  // start.
  void Bind() const {
    thread_local int bound = -1;
    if (bound != device_ && cudaSetDevice(device_) == cudaSuccess) bound = device_;
  }

  template <typename Args>
  absl::Status Do(const char* op, cudaError_t (*run)(const cuda::Launch&, const Args&), const Args& args) {
    Bind();
    cudaError_t error = run(launch_, args);
    // A call that may not be captured spoils the whole capture: the op that made it is named here.
    if (error == cudaSuccess && capturing_) {
      cudaStreamCaptureStatus state = cudaStreamCaptureStatusActive;
      error = cudaStreamIsCapturing(launch_.stream, &state);
      if (error == cudaSuccess && state != cudaStreamCaptureStatusActive) {
        error = cudaErrorStreamCaptureInvalidated;
      }
    }
    if (error == cudaSuccess) return absl::OkStatus();
    if (error == cudaErrorInvalidValue) {
      return absl::InvalidArgumentError(
          absl::StrCat("cuda backend: ", op, " does not take these shapes or types, or the workspace of ",
                       launch_.workspace_bytes, " bytes is too small for them"));
    }
    return absl::InternalError(absl::StrCat("cuda backend: ", op, ": ", cudaGetErrorName(error), " (",
                                            cudaGetErrorString(error), ")"));
  }

  absl::Status Copy(const char* call, void* to, const void* from, size_t bytes) {
    Bind();
    const cudaError_t error = cuda::CopyPinned(launch_, to, from, bytes);
    if (error == cudaSuccess) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("cuda backend: ", call, " of ", bytes, " bytes: ",
                                            cudaGetErrorName(error), " (", cudaGetErrorString(error), ")"));
  }

  cuda::Launch launch_{};
  cuda::Memory memory_;
  bool capturing_ = false;
  int device_ = 0;
  std::string device_name_;
  DeviceFacts facts_;
};

}  // namespace

int CudaDevices() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess ? devices : 0;
}

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const CudaBackendOptions& options) {
  return CudaBackend::Make(options);
}

}  // namespace kdt::kernels
