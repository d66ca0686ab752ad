// The collective of an epoch, by backend and by what --collective asks for.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kdt/kernels/backend.h"
#include "worker/collective/choice.h"
#include "worker/collective/collective.h"

namespace kdt {

struct GroupPlace {
  std::string id;  // the same on all ranks, new for each group
  int rank = 0;
  int size = 1;
  absl::Duration timeout;
  const std::atomic<bool>* cancelled = nullptr;  // may be null; lives as long as the collective
};

// Before the process starts its first thread: what the libraries behind a collective read from the
// environment.
void PrepareCollectives();

// Errors as MakeShmCollective and CudaCollective::Make. `kind` is one that ParseCollectiveKind takes for the
// backend.
absl::StatusOr<std::unique_ptr<Collective>> MakeCollective(const GroupPlace& place, CollectiveKind kind,
                                                           kernels::Backend& backend);

}  // namespace kdt
