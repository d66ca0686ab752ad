// The memory that ranks of one host show to each other, and the proof that they reach it.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/collective/cuda/host_exchange.h"
#include "worker/collective/cuda/ipc_kernels.h"

namespace kdt {

class IpcGroup {
 public:
  // Called by all ranks; succeeds on all or fails on all with the same error. UNAVAILABLE names the pair of
  // ranks whose GPUs do not reach each other's memory; the group may then go on without this.
  static absl::StatusOr<std::unique_ptr<IpcGroup>> Make(HostExchange& exchange, size_t buffer_bytes,
                                                        int device, cudaStream_t stream);
  // The stream is idle, no graph with this group's operations is replayed any more.
  ~IpcGroup();
  IpcGroup(const IpcGroup&) = delete;
  IpcGroup& operator=(const IpcGroup&) = delete;

  const cuda::IpcPeers& peers() const { return peers_; }
  int ranks_per_device() const { return ranks_per_device_; }  // on the fullest one

  // Makes the kernels that wait leave, and all later ones. From any thread.
  void Abort();
  bool aborted() const;
  // Ranks, as bits, that a kernel gave up waiting for.
  uint64_t Missing() const;
  int64_t wait_ns() const;

 private:
  IpcGroup() = default;
  absl::Status Allocate();
  absl::Status Open(HostExchange& exchange);
  absl::Status Reach(HostExchange& exchange);

  int device_ = 0;
  cudaStream_t stream_ = nullptr;
  cuda::IpcPeers peers_{};
  cuda::IpcHost* host_ = nullptr;  // peers_.host as the host sees it
  int ranks_per_device_ = 1;
};

// Waits for the stream, not longer than `limit`. DEADLINE_EXCEEDED: `what` did not finish.
absl::Status WaitIdle(cudaStream_t stream, absl::Duration limit, const std::string& what);

}  // namespace kdt
