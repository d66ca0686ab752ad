// An NCCL communicator. The library is opened when the first one is made, so that a machine without it only
// lacks this way.
//
// NCCL sums in an order of its own choice, which is not the ranks' order and may change with the size; all
// ranks still get the same bits of a reduction. NVLink multicast is off (NCCL_NVLS_ENABLE=0) unless the
// environment asks for it, and all connections are made at the start (NCCL_RUNTIME_CONNECT=0), because a
// capture cannot make them.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kdt/kernels/tensor.h"
#include "worker/collective/cuda/host_exchange.h"

namespace kdt {

// Sets those two variables where they are not set. Once before the process has threads: others may read the
// environment at the same time otherwise.
void SetNcclDefaults();

class NcclComm {
 public:
  // Called by all ranks; the id goes over the exchange. Succeeds on all or fails on all with the same error:
  // UNIMPLEMENTED (built without NCCL), NOT_FOUND (no library), INVALID_ARGUMENT (two ranks on one GPU, which
  // NCCL does not do). Gives up at the exchange's deadline.
  static absl::StatusOr<std::unique_ptr<NcclComm>> Make(HostExchange& exchange, int device,
                                                        cudaStream_t stream);
  virtual ~NcclComm() = default;

  virtual absl::Status AllReduce(void* x, kernels::DType type, int64_t count) = 0;
  virtual absl::Status AllGather(const void* in, size_t bytes, void* out) = 0;
  virtual absl::Status Broadcast(void* data, size_t bytes, int root) = 0;

  // What has gone wrong since, by itself.
  virtual absl::Status AsyncError() = 0;
  // Makes kernels that wait leave; the communicator is of no use afterwards. From any thread, more than once.
  virtual void Abort() = 0;
};

}  // namespace kdt
