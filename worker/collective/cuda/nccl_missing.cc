// In place of nccl_comm.cc in builds without NCCL's header.
#include "worker/collective/cuda/nccl_comm.h"

namespace kdt {

void SetNcclDefaults() {}

absl::StatusOr<std::unique_ptr<NcclComm>> NcclComm::Make(HostExchange&, int, cudaStream_t) {
  return absl::UnimplementedError("nccl: this build has no NCCL (KDT_NCCL)");
}

}  // namespace kdt
