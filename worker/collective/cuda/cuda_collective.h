// Collectives of the CUDA backend between ranks of one host: ipc, nccl, or whichever of both is faster for a
// size.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/collective/choice.h"
#include "worker/collective/collective.h"
#include "worker/collective/cuda/host_exchange.h"
#include "worker/collective/cuda/ipc_group.h"
#include "worker/collective/cuda/nccl_comm.h"

namespace kdt {

struct CudaCollectiveOptions {
  std::string id;  // as MakeShmCollective
  int rank = 0;
  int size = 1;
  CollectiveKind kind = CollectiveKind::kAuto;
  // Largest operation done in one piece by ipc, a multiple of 256, at least 64 KiB; twice that is taken on
  // the device.
  size_t buffer_bytes = size_t{8} << 20;
  absl::Duration timeout = absl::Seconds(60);
  const std::atomic<bool>* cancelled = nullptr;  // may be null
  cudaStream_t stream = nullptr;                 // of the backend
};

class CudaCollective : public Collective {
 public:
  // All ranks meet (errors as MakeShmCollective), then by kind:
  // kIpc: the ranks must reach each other's memory, else UNAVAILABLE names the pair.
  // kNccl: errors as NcclComm::Make.
  // kAuto: both where both work, and the faster one for each size, measured here; what is left out is logged
  // with the reason. An error only when neither works. A group of one needs neither. The calling thread is
  // bound to the stream's device. Graphs captured with its operations must be gone before the collective is.
  static absl::StatusOr<std::unique_ptr<CudaCollective>> Make(const CudaCollectiveOptions& options);
  ~CudaCollective() override;

  std::string name() const override;
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  absl::Status AllReduceSum(const kernels::Tensor& x) override;
  absl::Status AllReduceNorm(kernels::Backend& backend, const kernels::RmsNormArgs& norm) override;
  absl::Status AllReduceNormGemm(kernels::Backend& backend, const kernels::RmsNormArgs& norm,
                                 const kernels::GemmArgs& gemm) override;
  absl::Status AllGather(const void* in, size_t bytes, void* out) override;
  absl::Status Broadcast(void* data, size_t bytes, int root) override;
  absl::Status Finish(kernels::Backend& backend) override;
  absl::Status Probe() override;
  void SetDeadline(absl::Time deadline) override { deadline_ = deadline; }
  void Abort() override;
  int64_t wait_ns() const override { return ipc_ != nullptr ? ipc_->wait_ns() : 0; }

  // Finish for those who have the stream only.
  absl::Status FinishStream();

  bool Has(ReduceMethod method) const;
  // AllReduceSum by a method that the group has.
  absl::Status ReduceBy(ReduceMethod method, const kernels::Tensor& x);
  const ReduceChoice& choice() const { return choice_; }
  HostExchange& exchange() { return exchange_; }
  cudaStream_t stream() const { return stream_; }

 private:
  CudaCollective(std::unique_ptr<ShmSegment> segment, const CudaCollectiveOptions& options);
  absl::Status Connect(CollectiveKind kind, size_t buffer_bytes, int device);
  absl::Status ProbeBy(ReduceMethod method);
  absl::Status ProbeGemm();
  absl::Status Choose();
  absl::Status Alive() const;
  bool TakesNorm(const kernels::RmsNormArgs& norm) const;
  absl::Status GiveUp(bool late);

  const int rank_;
  const int size_;
  cudaStream_t const stream_;
  std::unique_ptr<ShmSegment> segment_;  // null in a group of one that needs none
  HostExchange exchange_;
  std::unique_ptr<IpcGroup> ipc_;
  std::unique_ptr<NcclComm> nccl_;
  bool sums_in_gemms_ = false;  // IpcReduceNormGemm has been tested
  ReduceChoice choice_{ReduceMethod::kOneShot};
  absl::Time deadline_ = absl::InfiniteFuture();
  uint32_t finishes_ = 0;
  std::atomic<bool> aborted_{false};
};

}  // namespace kdt
