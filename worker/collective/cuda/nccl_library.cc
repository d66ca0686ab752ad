#include "worker/collective/cuda/nccl_library.h"

#include <dlfcn.h>

#include "absl/strings/str_cat.h"

namespace kdt {
namespace {

constexpr char kName[] = "libnccl.so.2";

absl::StatusOr<NcclLibrary> Open() {
  void* const library = dlopen(kName, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return absl::NotFoundError(absl::StrCat("nccl: ", dlerror()));
  NcclLibrary api{};
  absl::Status status;
  const auto load = [&](auto* function, const char* name) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
    if (*function == nullptr) status = absl::NotFoundError(absl::StrCat("nccl: ", kName, " has no ", name));
  };
  load(&api.GetVersion, "ncclGetVersion");
  load(&api.GetErrorString, "ncclGetErrorString");
  load(&api.GetLastError, "ncclGetLastError");
  load(&api.GetUniqueId, "ncclGetUniqueId");
  load(&api.CommInitRankConfig, "ncclCommInitRankConfig");
  load(&api.CommGetAsyncError, "ncclCommGetAsyncError");
  load(&api.CommAbort, "ncclCommAbort");
  load(&api.AllReduce, "ncclAllReduce");
  load(&api.AllGather, "ncclAllGather");
  load(&api.Broadcast, "ncclBroadcast");
  if (!status.ok()) return status;
  return api;
}

}  // namespace

absl::StatusOr<const NcclLibrary*> NcclLibrary::Get() {
  static const absl::StatusOr<NcclLibrary> library = Open();
  if (!library.ok()) return library.status();
  return &*library;
}

absl::Status NcclLibrary::ToStatus(ncclResult_t result, ncclComm_t comm, const char* call) const {
  if (result == ncclSuccess) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("nccl: ", call, ": ", GetErrorString(result), " (", GetLastError(comm), ")"));
}

}  // namespace kdt
