// Forming a group: wait until every rank has loaded, check that they belong together, join them in a new
// epoch.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/group/group.h"
#include "coordinator/group/rank_link.h"

namespace kdt {

struct FormedGroup {
  uint64_t epoch = 0;
  GroupLimits limits;
  std::vector<v1::DescribeResponse> ranks;  // by rank
};

// Blocks; polls as long as ranks are loading. `cancelled` is asked between polls (CANCELLED). Errors name the
// rank. The epoch is larger than `last_epoch` and than any that a rank has told. With a `last_epoch` other
// than 0 a rank that listens and does not answer for 15 s hangs: the ranks that answer are then ended.
absl::StatusOr<FormedGroup> FormGroup(const std::vector<std::unique_ptr<RankLink>>& links,
                                      uint64_t last_epoch, const std::function<bool()>& cancelled);

// INVALID_ARGUMENT naming the rank when the descriptions do not make one group: rank, tp, checkpoint, sizes.
absl::StatusOr<GroupLimits> CheckDescriptions(const std::vector<v1::DescribeResponse>& ranks);

}  // namespace kdt
