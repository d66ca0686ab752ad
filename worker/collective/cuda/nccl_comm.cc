#include "worker/collective/cuda/nccl_comm.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "common/log.h"
#include "common/status.h"
#include "kernels/cuda/check.h"
#include "worker/collective/cuda/nccl_library.h"

namespace kdt {
namespace {

// How long the end of this object waits for NCCL to give a communicator up.
constexpr absl::Duration kAbortLimit = absl::Seconds(5);
constexpr absl::Duration kPoll = absl::Milliseconds(20);

class Comm : public NcclComm {
 public:
  Comm(const NcclLibrary* nccl, cudaStream_t stream) : nccl_(nccl), stream_(stream) {}

  ~Comm() override {
    Abort();
    if (gone_ != nullptr && !gone_->WaitForNotificationWithTimeout(kAbortLimit)) {
      spdlog::warn("nccl: a communicator has not ended within {} s", absl::ToDoubleSeconds(kAbortLimit));
    }
  }

  // The call waits for all ranks and cannot be interrupted, so it has a thread of its own, which outlives a
  // caller that gives up.
  absl::Status Init(const ncclUniqueId& id, HostExchange& exchange, int device) {
    const auto start = std::make_shared<Start>();
    std::thread([start, nccl = nccl_, id, device, ranks = exchange.size(), rank = exchange.rank()] {
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      ncclComm_t comm = nullptr;
      absl::Status status = KDT_CUDA_STATUS(cudaSetDevice(device));
      if (status.ok()) {
        status = nccl->ToStatus(nccl->CommInitRankConfig(&comm, ranks, id, rank, &config), nullptr,
                                "ncclCommInitRankConfig");
      }
      const std::lock_guard<std::mutex> lock(start->mutex);
      if (start->given_up && comm != nullptr) (void)nccl->CommAbort(comm);
      start->comm = comm;
      start->status = status;
      start->done.Notify();
    }).detach();
    while (!start->done.WaitForNotificationWithTimeout(kPoll)) {
      absl::Status over = exchange.segment().State();
      if (over.ok() && absl::Now() >= exchange.deadline()) {
        over = absl::DeadlineExceededError("nccl: the ranks did not connect in time");
      }
      const std::lock_guard<std::mutex> lock(start->mutex);
      if (over.ok() || start->done.HasBeenNotified()) continue;
      start->given_up = true;
      return over;
    }
    comm_ = start->comm;
    return start->status;
  }

  absl::Status AllReduce(void* x, kernels::DType type, int64_t count) override {
    const ncclDataType_t nccl_type = type == kernels::DType::kF32 ? ncclFloat32 : ncclBfloat16;
    return Call("ncclAllReduce", [&] {
      return nccl_->AllReduce(x, x, static_cast<size_t>(count), nccl_type, ncclSum, comm_, stream_);
    });
  }
  absl::Status AllGather(const void* in, size_t bytes, void* out) override {
    return Call("ncclAllGather", [&] { return nccl_->AllGather(in, out, bytes, ncclInt8, comm_, stream_); });
  }
  absl::Status Broadcast(void* data, size_t bytes, int root) override {
    return Call("ncclBroadcast",
                [&] { return nccl_->Broadcast(data, data, bytes, ncclInt8, root, comm_, stream_); });
  }

  absl::Status AsyncError() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (comm_ == nullptr) return absl::CancelledError("nccl: the communicator was given up");
    ncclResult_t state = ncclSuccess;
    KDT_RETURN_IF_ERROR(
        nccl_->ToStatus(nccl_->CommGetAsyncError(comm_, &state), comm_, "ncclCommGetAsyncError"));
    return nccl_->ToStatus(state, comm_, "asynchronous error");
  }

  // In a thread of its own: NCCL tells its kernels to leave at once, but then waits until no graph that was
  // captured with the communicator exists any more, and those belong to others.
  void Abort() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (comm_ == nullptr) return;
    gone_ = std::make_shared<absl::Notification>();
    std::thread([nccl = nccl_, comm = std::exchange(comm_, nullptr), gone = gone_] {
      (void)nccl->CommAbort(comm);
      gone->Notify();
    }).detach();
  }

 private:
  struct Start {
    std::mutex mutex;
    absl::Notification done;
    bool given_up = false;
    ncclComm_t comm = nullptr;
    absl::Status status;
  };

  template <typename F>
  absl::Status Call(const char* call, F f) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (comm_ == nullptr) return absl::CancelledError("nccl: the communicator was given up");
    return nccl_->ToStatus(f(), comm_, call);
  }

  const NcclLibrary* nccl_;
  cudaStream_t stream_;
  std::mutex mutex_;  // a call against Abort
  ncclComm_t comm_ = nullptr;
  std::shared_ptr<absl::Notification> gone_;
};

// Two ranks on one GPU would hang or be refused somewhere inside NCCL.
absl::Status CheckDevices(HostExchange& exchange, int device) {
  cudaDeviceProp properties;
  KDT_RETURN_IF_ERROR(exchange.Agree(KDT_CUDA_STATUS(cudaGetDeviceProperties(&properties, device))));
  KDT_ASSIGN_OR_RETURN(const std::vector<cudaUUID_t> devices, exchange.Gather(properties.uuid));
  for (size_t a = 0; a < devices.size(); ++a) {
    for (size_t b = a + 1; b < devices.size(); ++b) {
      if (std::memcmp(&devices[a], &devices[b], sizeof(cudaUUID_t)) != 0) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("nccl: rank ", a, " and rank ", b, " are on one GPU, which NCCL does not do"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

void SetNcclDefaults() {
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  setenv("NCCL_RUNTIME_CONNECT", "0", 0);
}

absl::StatusOr<std::unique_ptr<NcclComm>> NcclComm::Make(HostExchange& exchange, int device,
                                                         cudaStream_t stream) {
  KDT_RETURN_IF_ERROR(CheckDevices(exchange, device));
  SetNcclDefaults();
  const absl::StatusOr<const NcclLibrary*> nccl = NcclLibrary::Get();
  KDT_RETURN_IF_ERROR(exchange.Agree(nccl.status()));
  ncclUniqueId id{};
  absl::Status made;
  if (exchange.rank() == 0) made = (*nccl)->ToStatus((*nccl)->GetUniqueId(&id), nullptr, "ncclGetUniqueId");
  KDT_RETURN_IF_ERROR(exchange.Agree(made));
  KDT_ASSIGN_OR_RETURN(const std::vector<ncclUniqueId> ids, exchange.Gather(id));
  auto comm = std::make_unique<Comm>(*nccl, stream);
  KDT_RETURN_IF_ERROR(exchange.Agree(comm->Init(ids[0], exchange, device)));
  return comm;
}

}  // namespace kdt
