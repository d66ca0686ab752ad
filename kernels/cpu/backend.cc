// The CPU backend: each call runs its op to the end on the backend's threads.
#include "kdt/kernels/backend.h"

#include <sys/utsname.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/ops.h"

namespace kdt::kernels {
namespace {

constexpr size_t kAlignment = 256;
constexpr int kMaxThreads = 1024;

std::string ProcessorName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const size_t colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown processor";
}

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(int threads) : context_(threads), device_name_(ProcessorName()) {}

  std::string name() const override { return "cpu"; }
  std::string device_name() const override { return device_name_; }
  DeviceFacts facts() const override {
    utsname machine;
    return {uname(&machine) == 0 ? machine.machine : "", "", ""};
  }
  DType activation_dtype() const override { return DType::kF32; }

  absl::StatusOr<void*> Allocate(size_t bytes) override {
    if (bytes > SIZE_MAX - kAlignment) return OutOfMemory(bytes);
    // calloc takes large blocks from the system as zero pages that cost nothing until they are touched: a KV
    // pool or a buffer for the largest step is resident only as far as it is used. The block's begin lies
    // before the aligned part.
    void* block = std::calloc(1, bytes + kAlignment);
    if (block == nullptr) return OutOfMemory(bytes);
    const auto begin = reinterpret_cast<uintptr_t>(block);
    void** data = reinterpret_cast<void**>((begin / kAlignment + 1) * kAlignment);
    data[-1] = block;
    return static_cast<void*>(data);
  }
  void Free(void* data) override {
    if (data != nullptr) std::free(static_cast<void**>(data)[-1]);
  }
  absl::Status Upload(void* device, const void* host, size_t bytes) override {
    return Copy(device, host, bytes);
  }
  absl::Status Download(void* host, const void* device, size_t bytes) override {
    return Copy(host, device, bytes);
  }
  absl::Status Synchronize() override { return absl::OkStatus(); }

  absl::Status Embedding(const EmbeddingArgs& args) override { return Do(cpu::Embedding, args); }
  absl::Status RmsNorm(const RmsNormArgs& args) override { return Do(cpu::RmsNorm, args); }
  absl::Status Add(const AddArgs& args) override { return Do(cpu::Add, args); }
  absl::Status Rope(const RopeArgs& args) override { return Do(cpu::Rope, args); }
  absl::Status Gemm(const GemmArgs& args) override { return Do(cpu::Gemm, args); }
  absl::Status SiluMul(const SiluMulArgs& args) override { return Do(cpu::SiluMul, args); }
  absl::Status MlaPrepare(const MlaPrepareArgs& args) override { return Do(cpu::MlaPrepare, args); }
  absl::Status AbsorbQuery(const AbsorbQueryArgs& args) override { return Do(cpu::AbsorbQuery, args); }
  absl::Status AbsorbValue(const AbsorbValueArgs& args) override { return Do(cpu::AbsorbValue, args); }
  absl::Status KvWrite(const KvWriteArgs& args) override { return Do(cpu::KvWrite, args); }
  absl::Status KvMove(const KvMoveArgs& args) override { return Do(cpu::KvMove, args); }
  absl::Status TableWrite(const TableWriteArgs& args) override { return Do(cpu::TableWrite, args); }
  absl::Status VerifyAttention(const VerifyAttentionArgs& args) override {
    return Do(cpu::VerifyAttention, args);
  }
  absl::Status VerifyAttentionReference(const VerifyAttentionArgs& args) override {
    return Do(cpu::VerifyAttention, args);
  }
  absl::Status Compare(const CompareArgs& args) override { return Do(cpu::Compare, args); }
  absl::Status DraftPrepare(const DraftPrepareArgs& args) override { return Do(cpu::DraftPrepare, args); }
  absl::Status DraftAttention(const DraftAttentionArgs& args) override {
    return Do(cpu::DraftAttention, args);
  }
  absl::Status Router(const RouterArgs& args) override { return Do(cpu::Router, args); }
  absl::Status Moe(const MoeArgs& args) override { return Do(cpu::Moe, args); }
  absl::Status LogitsTopK(const LogitsTopKArgs& args) override { return Do(cpu::LogitsTopK, args); }
  absl::Status ScaleRows(const ScaleRowsArgs& args) override { return Do(cpu::ScaleRows, args); }
  absl::Status GumbelArgmax(const GumbelArgmaxArgs& args) override { return Do(cpu::GumbelArgmax, args); }
  absl::Status TreeWalk(const TreeWalkArgs& args) override { return Do(cpu::TreeWalk, args); }

 private:
  static absl::Status OutOfMemory(size_t bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("cpu backend: no memory for ", bytes, " bytes"));
  }
  static absl::Status Copy(void* to, const void* from, size_t bytes) {
    if (bytes != 0) std::memcpy(to, from, bytes);
    return absl::OkStatus();
  }
  template <typename Args>
  absl::Status Do(void (*op)(cpu::Context&, const Args&), const Args& args) {
    op(context_, args);
    return absl::OkStatus();
  }

  cpu::Context context_;
  std::string device_name_;
};

}  // namespace

absl::StatusOr<void*> Backend::AllocateHost(size_t bytes) {
  constexpr size_t kHostAlignment = 64;
  if (bytes > SIZE_MAX - kHostAlignment) {
    return absl::ResourceExhaustedError(
        absl::StrCat(name(), " backend: no host memory for ", bytes, " bytes"));
  }
  const size_t whole = (bytes / kHostAlignment + 1) * kHostAlignment;
  void* data = std::aligned_alloc(kHostAlignment, whole);
  if (data == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat(name(), " backend: no host memory for ", bytes, " bytes"));
  }
  std::memset(data, 0, whole);
  return data;
}
void Backend::FreeHost(void* data) { std::free(data); }

absl::Status Backend::MlaQuery(const MlaQueryArgs& args) {
  absl::Status status = MlaPrepare(args.prepare);
  if (status.ok())
    status = Gemm({args.prepare.qkv.Columns(0, args.prepare.q_lora), args.w_q_b, args.absorb.q});
  return status.ok() ? AbsorbQuery(args.absorb) : status;
}

absl::StatusOr<std::unique_ptr<Graph>> Backend::Capture(absl::FunctionRef<absl::Status()>) {
  return absl::UnimplementedError(absl::StrCat("the ", name(), " backend does not capture graphs"));
}

absl::StatusOr<std::unique_ptr<Backend>> MakeCpuBackend(int threads) {
  if (threads < 1 || threads > kMaxThreads) {
    return absl::InvalidArgumentError(
        absl::StrCat("cpu backend: threads is ", threads, ", not 1 .. ", kMaxThreads));
  }
  return std::make_unique<CpuBackend>(threads);
}

}  // namespace kdt::kernels
