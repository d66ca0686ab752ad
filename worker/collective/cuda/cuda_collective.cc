#include "worker/collective/cuda/cuda_collective.h"

#include <sys/prctl.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/bf16.h"
#include "common/log.h"
#include "common/status.h"
#include "kernels/cuda/check.h"
#include "worker/collective/cuda/measure.h"

namespace kdt {
namespace {

// How long the kernels of a group that was given up may take to leave.
constexpr absl::Duration kLeaveLimit = absl::Seconds(2);
// Looks at the stream without any pause in between, then with one: a step takes milliseconds, and several
// ranks may share a core.
constexpr int kEagerLooks = 200;
constexpr unsigned long kTimerSlackNanos = 1000;
constexpr absl::Duration kPause = absl::Microseconds(10);
constexpr absl::Duration kLookForDead = absl::Milliseconds(50);
constexpr int kLooksForEnded = 20;
constexpr absl::Duration kBetweenLooks = absl::Milliseconds(10);
constexpr int64_t kProbeValues = 20011;  // more than one block, and not a multiple of a vector

// More rows than this the norm does better in a kernel of its own, a block a row.
constexpr int64_t kMostFusedRows = 64;
// Above this a group that was not measured sums in two shots.
constexpr size_t kTwoShotAbove = 64 << 10;

}  // namespace

CudaCollective::CudaCollective(std::unique_ptr<ShmSegment> segment, const CudaCollectiveOptions& options)
    : rank_(options.rank),
      size_(options.size),
      stream_(options.stream),
      segment_(std::move(segment)),
      exchange_(segment_.get()) {}

absl::StatusOr<std::unique_ptr<CudaCollective>> CudaCollective::Make(const CudaCollectiveOptions& options) {
  const absl::Time deadline = absl::Now() + options.timeout;
  int device = 0;
  KDT_CUDA_RETURN_IF_ERROR(cudaStreamGetDevice(options.stream, &device));
  KDT_CUDA_RETURN_IF_ERROR(cudaSetDevice(device));
  (void)prctl(PR_SET_TIMERSLACK, kTimerSlackNanos);  // without it a pause is five times as long
  std::unique_ptr<ShmSegment> segment;
  const bool alone = options.size == 1 && options.kind != CollectiveKind::kNccl;
  if (!alone) {
    KDT_ASSIGN_OR_RETURN(segment,
                         ShmSegment::Join(options.id, options.rank, options.size, HostExchange::kBufferBytes,
                                          options.timeout, options.cancelled));
  }
  std::unique_ptr<CudaCollective> collective(new CudaCollective(std::move(segment), options));
  if (alone) return collective;
  collective->deadline_ = deadline;
  collective->exchange_.SetDeadline(deadline);
  KDT_RETURN_IF_ERROR(collective->Connect(options.kind, options.buffer_bytes, device));
  KDT_RETURN_IF_ERROR(collective->Choose());
  collective->deadline_ = absl::InfiniteFuture();
  return collective;
}

absl::Status CudaCollective::Connect(CollectiveKind kind, size_t buffer_bytes, int device) {
  KDT_ASSIGN_OR_RETURN(const std::vector<CollectiveKind> kinds, exchange_.Gather(kind));
  if (std::any_of(kinds.begin(), kinds.end(), [&](CollectiveKind k) { return k != kinds[0]; })) {
    return absl::FailedPreconditionError("--collective is not the same on all ranks");
  }
  absl::Status no_ipc;
  if (kind != CollectiveKind::kNccl) {
    auto ipc = IpcGroup::Make(exchange_, buffer_bytes, device, stream_);
    if (ipc.ok()) {
      ipc_ = *std::move(ipc);
      no_ipc = ProbeBy(ReduceMethod::kOneShot);
      if (no_ipc.ok()) no_ipc = ProbeBy(ReduceMethod::kTwoShot);
      if (no_ipc.ok()) no_ipc = ProbeGemm();
      if (!no_ipc.ok()) ipc_.reset();
    } else {
      no_ipc = ipc.status();
    }
    if (kind == CollectiveKind::kIpc) return no_ipc;
    // With a group that has ended there is nothing to fall back to.
    KDT_RETURN_IF_ERROR(segment_->State());
  }
  auto nccl = NcclComm::Make(exchange_, device, stream_);
  absl::Status no_nccl = nccl.status();
  if (nccl.ok()) {
    nccl_ = *std::move(nccl);
    no_nccl = ProbeBy(ReduceMethod::kNccl);
    if (!no_nccl.ok()) nccl_.reset();
  }
  if (kind == CollectiveKind::kNccl) return no_nccl;
  if (!no_ipc.ok() && !no_nccl.ok()) {
    return absl::UnavailableError(absl::StrCat(no_ipc.message(), "; ", no_nccl.message()));
  }
  if (rank_ != 0) return absl::OkStatus();
  if (!no_ipc.ok()) spdlog::warn("collective: nccl for all sizes, because {}", no_ipc.message());
  if (!no_nccl.ok()) spdlog::info("collective: ipc for all sizes, because {}", no_nccl.message());
  return absl::OkStatus();
}

// Every rank contributes rank + 1 in each place, and finds n (n + 1) / 2 there.
absl::Status CudaCollective::ProbeBy(ReduceMethod method) {
  const size_t bytes = kProbeValues * sizeof(float);
  std::vector<float> values(kProbeValues, static_cast<float>(rank_ + 1));
  void* x = nullptr;
  const auto run = [&]() -> absl::Status {
    KDT_CUDA_RETURN_IF_ERROR(cudaMalloc(&x, bytes));
    KDT_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(x, values.data(), bytes, cudaMemcpyHostToDevice, stream_));
    KDT_RETURN_IF_ERROR(ReduceBy(method, kernels::MakeTensor(x, kernels::DType::kF32, 1, kProbeValues)));
    KDT_RETURN_IF_ERROR(FinishStream());
    return KDT_CUDA_STATUS(cudaMemcpy(values.data(), x, bytes, cudaMemcpyDeviceToHost));
  };
  absl::Status status = run();
  if (x != nullptr) (void)cudaFree(x);
  const auto expected = static_cast<float>(size_ * (size_ + 1) / 2);
  const auto wrong = std::find_if(values.begin(), values.end(), [&](float v) { return v != expected; });
  if (status.ok() && wrong != values.end()) {
    status = absl::InternalError(absl::StrCat("the first reduction (", ReduceMethodName(method), ") over ",
                                              size_, " ranks gave rank ", rank_, " ", *wrong, " instead of ",
                                              expected, " at ", wrong - values.begin()));
  }
  return exchange_.Agree(status);
}

// A row of the sum over the ranks of rank + 1 in each place, whose norm is 1 in each place, times ones. Where
// no kernel takes it (ranks share a GPU, or their GPUs are unlike) there is nothing to test.
absl::Status CudaCollective::ProbeGemm() {
  constexpr int64_t kCols = 3072, kOuts = 64;
  constexpr uint16_t kOne = 0x3f80;
  std::vector<uint16_t> values((kOuts + 4) * kCols, kOne);  // W, then weight, x, residual and out
  std::fill_n(values.begin() + (kOuts + 1) * kCols, kCols, FloatToBf16(static_cast<float>(rank_ + 1)));
  std::fill_n(values.begin() + (kOuts + 2) * kCols, 2 * kCols, uint16_t{0});
  std::vector<float> y(kOuts);
  const size_t bytes = values.size() * sizeof(uint16_t);
  void* memory = nullptr;
  bool taken = false;
  const auto run = [&]() -> absl::Status {
    KDT_CUDA_RETURN_IF_ERROR(cudaMalloc(&memory, bytes + kOuts * sizeof(float)));
    KDT_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(memory, values.data(), bytes, cudaMemcpyHostToDevice, stream_));
    const auto rows = [&](int64_t first, int64_t count) {
      return kernels::MakeTensor(static_cast<char*>(memory) + first * kCols * 2, kernels::DType::kBF16, count,
                                 kCols);
    };
    const kernels::RmsNormArgs norm{rows(kOuts + 1, 1), rows(kOuts + 2, 1), rows(kOuts, 1).bf16(), 0.0f,
                                    rows(kOuts + 3, 1)};
    const kernels::GemmArgs gemm{
        norm.out, rows(0, kOuts),
        kernels::MakeTensor(static_cast<char*>(memory) + bytes, kernels::DType::kF32, 1, kOuts)};
    taken = cuda::IpcTakesGemm(ipc_->peers(), norm, gemm);
    if (!taken) return absl::OkStatus();
    KDT_CUDA_RETURN_IF_ERROR(cuda::IpcReduceNormGemm(ipc_->peers(), norm, gemm, stream_));
    KDT_RETURN_IF_ERROR(FinishStream());
    KDT_CUDA_RETURN_IF_ERROR(
        cudaMemcpy(y.data(), gemm.y.data, kOuts * sizeof(float), cudaMemcpyDeviceToHost));
    const auto expected = static_cast<float>(kCols);
    const auto wrong = std::find_if(y.begin(), y.end(), [&](float v) { return v != expected; });
    if (wrong == y.end()) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat("the first one over ", size_, " ranks gave rank ", rank_, " ",
                                            *wrong, " instead of ", expected));
  };
  absl::Status status = run();
  if (memory != nullptr) (void)cudaFree(memory);
  status = exchange_.Agree(status);
  sums_in_gemms_ = taken && status.ok();
  if (!absl::IsDataLoss(status)) return status;
  // No reason to do without the ways that have passed.
  if (rank_ == 0) spdlog::warn("collective: no sums as a part of gemms, because {}", status.message());
  return absl::OkStatus();
}

absl::Status CudaCollective::Choose() {
  if (ipc_ == nullptr) {
    choice_ = ReduceChoice(ReduceMethod::kNccl);
    return absl::OkStatus();
  }
  KDT_ASSIGN_OR_RETURN(const std::vector<ReduceTimes> times,
                       MeasureChoice(*this, ipc_->peers().buffer_bytes));
  if (times.empty()) {
    choice_ = ReduceChoice::BySize(kTwoShotAbove);
    if (rank_ == 0) {
      spdlog::warn("collective: too slow to be measured ({} ranks on one GPU; no MPS?), {}",
                   ipc_->ranks_per_device(), choice_.ToString());
    }
    return absl::OkStatus();
  }
  choice_ = ReduceChoice::Fastest(times);
  if (rank_ == 0) {
    spdlog::info("collective: all-reduce by {}, measured here:\n{}", choice_.ToString(),
                 ReduceTimesTable(times));
    if (sums_in_gemms_)
      spdlog::info("collective: one-shot sums of few rows are a part of the gemm behind them");
  }
  return absl::OkStatus();
}

CudaCollective::~CudaCollective() {
  Abort();
  // Errors on the way down have no one to go to.
  (void)WaitIdle(stream_, kLeaveLimit, "collective");
}

std::string CudaCollective::name() const {
  if (ipc_ == nullptr) return nccl_ == nullptr ? "local" : "nccl";
  return choice_.Uses(ReduceMethod::kNccl) ? "ipc+nccl" : "ipc";
}

absl::Status CudaCollective::Alive() const {
  return aborted_.load(std::memory_order_acquire) ? absl::CancelledError("the epoch has ended")
                                                  : absl::OkStatus();
}

bool CudaCollective::Has(ReduceMethod method) const {
  return method == ReduceMethod::kNccl ? nccl_ != nullptr : ipc_ != nullptr;
}

absl::Status CudaCollective::AllReduceSum(const kernels::Tensor& x) {
  KDT_CHECK(x.stride == x.cols || x.rows <= 1);
  if (segment_ == nullptr || x.rows * x.cols == 0) return Alive();
  return ReduceBy(choice_.Of(static_cast<size_t>(x.rows * x.cols * kernels::DTypeSize(x.dtype))), x);
}

absl::Status CudaCollective::ReduceBy(ReduceMethod method, const kernels::Tensor& x) {
  KDT_CHECK(Has(method) && reinterpret_cast<uintptr_t>(x.data) % 16 == 0);
  KDT_RETURN_IF_ERROR(Alive());
  const int64_t count = x.rows * x.cols;
  if (method == ReduceMethod::kNccl) return nccl_->AllReduce(x.data, x.dtype, count);
  auto* const reduce = method == ReduceMethod::kOneShot ? cuda::IpcReduceOneShot : cuda::IpcReduceTwoShot;
  const int64_t value_bytes = kernels::DTypeSize(x.dtype);
  const int64_t piece = static_cast<int64_t>(ipc_->peers().buffer_bytes) / value_bytes;
  for (int64_t begin = 0; begin < count; begin += piece) {
    std::byte* const at = static_cast<std::byte*>(x.data) + begin * value_bytes;
    KDT_CUDA_RETURN_IF_ERROR(reduce(ipc_->peers(), at, x.dtype, std::min(piece, count - begin), stream_));
  }
  return absl::OkStatus();
}

bool CudaCollective::TakesNorm(const kernels::RmsNormArgs& norm) const {
  const auto bytes = static_cast<size_t>(norm.x.rows * norm.x.cols * kernels::DTypeSize(norm.x.dtype));
  return ipc_ != nullptr && norm.x.rows <= kMostFusedRows && bytes <= ipc_->peers().buffer_bytes &&
         choice_.Of(bytes) == ReduceMethod::kOneShot && cuda::IpcTakesNorm(norm);
}

absl::Status CudaCollective::AllReduceNorm(kernels::Backend& backend, const kernels::RmsNormArgs& norm) {
  if (!TakesNorm(norm)) return Collective::AllReduceNorm(backend, norm);
  KDT_RETURN_IF_ERROR(Alive());
  return KDT_CUDA_STATUS(cuda::IpcReduceNorm(ipc_->peers(), norm, stream_));
}

absl::Status CudaCollective::AllReduceNormGemm(kernels::Backend& backend, const kernels::RmsNormArgs& norm,
                                               const kernels::GemmArgs& gemm) {
  if (!sums_in_gemms_ || !TakesNorm(norm) || !cuda::IpcTakesGemm(ipc_->peers(), norm, gemm)) {
    return Collective::AllReduceNormGemm(backend, norm, gemm);
  }
  KDT_RETURN_IF_ERROR(Alive());
  return KDT_CUDA_STATUS(cuda::IpcReduceNormGemm(ipc_->peers(), norm, gemm, stream_));
}

absl::Status CudaCollective::AllGather(const void* in, size_t bytes, void* out) {
  KDT_RETURN_IF_ERROR(Alive());
  if (bytes == 0) return absl::OkStatus();
  if (segment_ == nullptr) {
    return KDT_CUDA_STATUS(cudaMemcpyAsync(out, in, bytes, cudaMemcpyDeviceToDevice, stream_));
  }
  if (ipc_ == nullptr) return nccl_->AllGather(in, bytes, out);
  const size_t piece = ipc_->peers().buffer_bytes;
  for (size_t begin = 0; begin < bytes; begin += piece) {
    KDT_CUDA_RETURN_IF_ERROR(cuda::IpcGather(ipc_->peers(), static_cast<const std::byte*>(in) + begin,
                                             std::min(piece, bytes - begin),
                                             static_cast<std::byte*>(out) + begin, bytes, stream_));
  }
  return absl::OkStatus();
}

absl::Status CudaCollective::Broadcast(void* data, size_t bytes, int root) {
  KDT_CHECK(root >= 0 && root < size_);
  KDT_RETURN_IF_ERROR(Alive());
  if (bytes == 0 || segment_ == nullptr) return absl::OkStatus();
  if (ipc_ == nullptr) return nccl_->Broadcast(data, bytes, root);
  const size_t piece = ipc_->peers().buffer_bytes;
  for (size_t begin = 0; begin < bytes; begin += piece) {
    KDT_CUDA_RETURN_IF_ERROR(cuda::IpcBroadcast(ipc_->peers(), static_cast<std::byte*>(data) + begin,
                                                std::min(piece, bytes - begin), root, stream_));
  }
  return absl::OkStatus();
}

// The group was tested, by every method it has, while it was made.
absl::Status CudaCollective::Probe() { return Alive(); }

absl::Status CudaCollective::Finish(kernels::Backend& backend) {
  KDT_RETURN_IF_ERROR(FinishStream());
  return backend.Synchronize();
}

absl::Status CudaCollective::FinishStream() {
  if (segment_ != nullptr) segment_->SetProgress(++finishes_);
  absl::Time look_for_dead = absl::Now() + kLookForDead;
  for (int looks = 0;; ++looks) {
    const cudaError_t state = cudaStreamQuery(stream_);
    if (state == cudaSuccess) break;
    if (state != cudaErrorNotReady) {
      const absl::Status error = KDT_CUDA_STATUS(state);
      Abort();  // the others wait for what will not come
      return error;
    }
    if (looks < kEagerLooks) continue;
    const absl::Time now = absl::Now();
    if (segment_ == nullptr) {
      if (aborted_.load(std::memory_order_acquire)) return Alive();
      if (now >= deadline_) return absl::DeadlineExceededError("the device did not finish in time");
    } else {
      if (now >= look_for_dead) {
        segment_->FindDead();
        look_for_dead = now + kLookForDead;
      }
      if (!segment_->State().ok()) return GiveUp(false);
      if (now >= deadline_) return GiveUp(true);
      if (nccl_ != nullptr) {
        if (const absl::Status error = nccl_->AsyncError(); !error.ok()) {
          // Most often another process has just ended, and in a moment it can be named.
          for (int i = 0; i < kLooksForEnded && segment_->State().ok(); ++i) {
            absl::SleepFor(kBetweenLooks);
            segment_->FindDead();
          }
          if (!segment_->State().ok()) return GiveUp(false);
          Abort();
          return error;
        }
      }
    }
    absl::SleepFor(kPause);
  }
  // Kernels that were told to leave have left the stream empty, too.
  if (ipc_ != nullptr && ipc_->aborted()) return GiveUp(false);
  return Alive();
}

// The kernels tell whom they waited for as they leave; where they cannot, how far each rank's host has come
// does.
absl::Status CudaCollective::GiveUp(bool late) {
  if (ipc_ != nullptr) ipc_->Abort();
  if (nccl_ != nullptr) nccl_->Abort();
  aborted_.store(true, std::memory_order_release);
  const absl::Status left = WaitIdle(stream_, kLeaveLimit, "what was queued on the device");
  if (!late) {
    const absl::Status state = segment_->State();
    return state.ok() ? Alive() : state;
  }
  uint64_t missing = ipc_ != nullptr ? ipc_->Missing() : 0;
  if (missing == 0) missing = segment_->Behind(finishes_);
  if (missing != 0) return segment_->EndLate(missing);
  segment_->Abort();
  return absl::DeadlineExceededError(absl::StrCat(
      "the device did not finish in time, and no rank was missing", left.ok() ? "" : "; ", left.message()));
}

void CudaCollective::Abort() {
  aborted_.store(true, std::memory_order_release);
  if (ipc_ != nullptr) ipc_->Abort();
  if (nccl_ != nullptr) nccl_->Abort();
  if (segment_ != nullptr) segment_->Abort();
}

}  // namespace kdt
