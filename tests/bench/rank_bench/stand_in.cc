#include "tests/bench/rank_bench/stand_in.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "worker/collective/cuda/ipc_kernels.h"

namespace kdt::bench {
namespace {

using kernels::Buffer;

constexpr size_t kBufferBytes = size_t{8} << 20;
constexpr uint32_t kAlwaysThere = 1u << 30;  // ahead of any operation's number
constexpr int64_t kMostFusedRows = 64;       // as CudaCollective

absl::Status State(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("stand-in: ", what, ": ", cudaGetErrorString(error)));
}

int CurrentDevice() {
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess ? device : 0;
}

class LocalStandIn final : public StandIn {
 public:
  LocalStandIn(kernels::Backend* backend, int rank, int size) : backend_(backend) {
    peers_.rank = rank;
    peers_.size = size;
    peers_.buffer_bytes = kBufferBytes;
    peers_.max_blocks = cuda::kIpcMaxBlocks;
    peers_.own_gpu = true;
  }
  ~LocalStandIn() override {
    if (host_ != nullptr) backend_->FreeHost(host_);
  }

  absl::Status Allocate() {
    for (int rank = 0; rank < peers_.size; ++rank) {
      KDT_ASSIGN_OR_RETURN(Buffer block, Buffer::Make(*backend_, cuda::kIpcFlagBytes + 2 * kBufferBytes));
      peers_.blocks[rank] = block.as<std::byte>();
      blocks_.push_back(std::move(block));
    }
    std::vector<uint32_t> flags(cuda::kIpcFlagBytes / sizeof(uint32_t), kAlwaysThere);
    KDT_RETURN_IF_ERROR(backend_->Upload(blocks_[peers_.rank].data(), flags.data(), cuda::kIpcFlagBytes));
    KDT_ASSIGN_OR_RETURN(local_, Buffer::Make(*backend_, sizeof(cuda::IpcLocal)));
    peers_.local = local_.as<cuda::IpcLocal>();
    constexpr size_t kMails = 2 * sizeof(cuda::IpcMail);
    KDT_ASSIGN_OR_RETURN(mails_, Buffer::Make(*backend_, kMails));
    const std::vector<char> empty(kMails, static_cast<char>(0xff));
    KDT_RETURN_IF_ERROR(backend_->Upload(mails_.data(), empty.data(), kMails));
    peers_.mails = mails_.as<cuda::IpcMail>();
    KDT_RETURN_IF_ERROR(
        State(cudaDeviceGetAttribute(&peers_.processors, cudaDevAttrMultiProcessorCount, CurrentDevice()),
              "device"));
    KDT_ASSIGN_OR_RETURN(host_, backend_->AllocateHost(sizeof(cuda::IpcHost)));
    peers_.host = static_cast<cuda::IpcHost*>(host_);
    return backend_->Synchronize();
  }

  absl::Status BeLate(uint32_t ns) override {
    KDT_RETURN_IF_ERROR(backend_->Synchronize());
    return backend_->Upload(&peers_.local->late_ns, &ns, sizeof(ns));
  }
  std::string name() const override { return "stand-in"; }
  int rank() const override { return peers_.rank; }
  int size() const override { return peers_.size; }

  absl::Status AllReduceSum(const kernels::Tensor& x) override {
    const int64_t count = x.rows * x.cols;
    if (static_cast<size_t>(count * kernels::DTypeSize(x.dtype)) > kBufferBytes) {
      return absl::InvalidArgumentError(absl::StrCat("stand-in: ", x.rows, " rows are too many"));
    }
    return State(cuda::IpcReduceOneShot(peers_, x.data, x.dtype, count, stream()), "reduce");
  }
  absl::Status AllReduceNorm(kernels::Backend& backend, const kernels::RmsNormArgs& norm) override {
    if (norm.x.rows > kMostFusedRows || !cuda::IpcTakesNorm(norm)) {
      return Collective::AllReduceNorm(backend, norm);
    }
    return State(cuda::IpcReduceNorm(peers_, norm, stream()), "reduce and norm");
  }
  absl::Status AllReduceNormGemm(kernels::Backend& backend, const kernels::RmsNormArgs& norm,
                                 const kernels::GemmArgs& gemm) override {
    if (!cuda::IpcTakesGemm(peers_, norm, gemm)) return Collective::AllReduceNormGemm(backend, norm, gemm);
    return State(cuda::IpcReduceNormGemm(peers_, norm, gemm, stream()), "reduce, norm and gemm");
  }
  absl::Status AllGather(const void* in, size_t bytes, void* out) override {
    if (bytes > kBufferBytes) return absl::InvalidArgumentError("stand-in: a gather is too large");
    return State(cuda::IpcGather(peers_, in, bytes, out, bytes, stream()), "gather");
  }
  absl::Status Broadcast(void*, size_t, int) override { return absl::OkStatus(); }
  void SetDeadline(absl::Time) override {}
  void Abort() override {}
  int64_t wait_ns() const override { return 0; }

 private:
  cudaStream_t stream() const { return static_cast<cudaStream_t>(backend_->stream()); }

  kernels::Backend* backend_;
  cuda::IpcPeers peers_{};
  std::vector<Buffer> blocks_;
  Buffer local_, mails_;
  void* host_ = nullptr;
};

}  // namespace

absl::StatusOr<std::unique_ptr<StandIn>> MakeStandIn(kernels::Backend* backend, int rank, int size) {
  if (size > cuda::kIpcMaxRanks) return absl::InvalidArgumentError("--tp is too large");
  auto stand_in = std::make_unique<LocalStandIn>(backend, rank, size);
  KDT_RETURN_IF_ERROR(stand_in->Allocate());
  return stand_in;
}

absl::Status LastFor(StandIn& stand_in, kernels::Backend& backend, int64_t rows, int64_t cols, double us) {
  constexpr int kCorrections = 3;
  double late_us = 0;
  for (int i = 0; i <= kCorrections; ++i) {
    KDT_RETURN_IF_ERROR(stand_in.BeLate(static_cast<uint32_t>(std::max(0.0, late_us) * 1000)));
    if (i == kCorrections) break;
    KDT_ASSIGN_OR_RETURN(const double now, MeasureReduceNorm(stand_in, backend, rows, cols));
    late_us += us - now;
  }
  return absl::OkStatus();
}

absl::StatusOr<double> MeasureReduceNorm(Collective& collective, kernels::Backend& backend, int64_t rows,
                                         int64_t cols) {
  constexpr int kCalls = 64, kReplays = 21;
  const auto tensor = [&](const Buffer& buffer) {
    return kernels::MakeTensor(buffer.data(), kernels::DType::kBF16, rows, cols);
  };
  const size_t bytes = static_cast<size_t>(rows * cols) * 2;
  KDT_ASSIGN_OR_RETURN(const Buffer x, Buffer::Make(backend, bytes));
  KDT_ASSIGN_OR_RETURN(const Buffer residual, Buffer::Make(backend, bytes));
  KDT_ASSIGN_OR_RETURN(const Buffer out, Buffer::Make(backend, bytes));
  KDT_ASSIGN_OR_RETURN(const Buffer weight, Buffer::Make(backend, cols * 2));
  KDT_ASSIGN_OR_RETURN(const auto graph, backend.Capture([&]() -> absl::Status {
    for (int i = 0; i < kCalls; ++i) {
      KDT_RETURN_IF_ERROR(collective.AllReduceNorm(
          backend, {tensor(x), tensor(residual), weight.as<uint16_t>(), 1e-5f, tensor(out)}));
    }
    return absl::OkStatus();
  }));
  std::vector<double> times;
  for (int i = 0; i < kReplays; ++i) {
    KDT_RETURN_IF_ERROR(backend.Synchronize());
    const auto start = std::chrono::steady_clock::now();
    KDT_RETURN_IF_ERROR(graph->Replay());
    KDT_RETURN_IF_ERROR(backend.Synchronize());
    times.push_back(
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count() / kCalls);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace kdt::bench
