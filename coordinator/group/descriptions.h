// Whether the ranks belong together, by what each tells of itself.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/group/group.h"
#include "kdt/v1/worker.pb.h"

namespace kdt {

// `ranks` by rank. INVALID_ARGUMENT naming the rank when they do not make one group: rank, tp, checkpoint,
// GPUs, sizes.
absl::StatusOr<GroupLimits> CheckDescriptions(const std::vector<v1::DescribeResponse>& ranks);

}  // namespace kdt
