// The functions of libnccl.so.2 that are used, opened at run time.
#pragma once

#include <nccl.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kdt {

struct NcclLibrary {
  decltype(&ncclGetVersion) GetVersion;
  decltype(&ncclGetErrorString) GetErrorString;
  decltype(&ncclGetLastError) GetLastError;
  decltype(&ncclGetUniqueId) GetUniqueId;
  decltype(&ncclCommInitRankConfig) CommInitRankConfig;
  decltype(&ncclCommGetAsyncError) CommGetAsyncError;
  decltype(&ncclCommAbort) CommAbort;
  decltype(&ncclAllReduce) AllReduce;
  decltype(&ncclAllGather) AllGather;
  decltype(&ncclBroadcast) Broadcast;

  // The library of this process; it is never closed. NOT_FOUND with the loader's reason.
  static absl::StatusOr<const NcclLibrary*> Get();

  absl::Status ToStatus(ncclResult_t result, ncclComm_t comm, const char* call) const;
};

}  // namespace kdt
