// The tensor-parallel group as the scheduler sees it: limits, state, and one step at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kdt {

namespace v1 {
class StepRequest;
class StepResponse;
}  // namespace v1

enum class GroupState { kDown, kJoining, kServing };

// What every rank of the group can do; all have told the same.
struct GroupLimits {
  uint64_t kv_slots = 0;
  uint32_t max_rows = 0;          // a step
  uint32_t max_tree_nodes = 0;    // a tree, root included
  uint32_t max_sequences = 0;     // alive at once
  uint32_t max_context = 0;       // tokens of a sequence; 0: what the model allows
  uint32_t draft_block_size = 0;  // 0: no drafter
  uint32_t max_draft_top_k = 0;
  std::string checkpoint_digest;
};

// One rank for GetClusterInfo and the metrics.
struct RankStatus {
  uint32_t rank = 0;
  std::string address;
  std::string backend;
  std::string device;
  bool up = false;
  std::string last_error;
  uint64_t kv_slots_total = 0;
  uint64_t kv_slots_used = 0;
  double kv_fragmentation = 0;
  uint64_t steps = 0;
  double busy_ratio =
      0;  // share of the time since the group formed that went into steps, waiting for peers not counted
};

// What the last step cost on this side, in microseconds.
struct StepCost {
  double round_trip_us = 0;  // Send called .. rank 0's answer parsed
  double worker_us = 0;      // rank 0's own total
  double transport_us = 0;   // the difference
};

// Send, Receive, Poll, Reject and last_cost belong to one thread, the scheduler's; the rest may be called
// from any.
class Group {
 public:
  virtual ~Group() = default;

  // Starts to form the group (connect, wait until loaded, join) in the background. Only while kDown.
  virtual void Form() = 0;
  virtual GroupState state() const = 0;
  virtual std::string reason() const = 0;  // why it does not serve; names the rank
  virtual uint64_t epoch() const = 0;
  virtual GroupLimits limits() const = 0;  // of the epoch that serves or served last
  virtual std::vector<RankStatus> Ranks() const = 0;

  // Sends a step to every rank; fills epoch, step and deadline in. One step at a time.
  virtual absl::Status Send(v1::StepRequest* request) = 0;
  // Waits for rank 0's answer to the step sent. Before it returns, every rank's answer to the step *before*
  // has been compared, so tokens of a step are never released on top of a divergence. An error ends the
  // epoch: the state is kDown, and reason() names the rank.
  virtual absl::Status Receive(v1::StepResponse* response) = 0;
  // Between steps: takes late answers in and notices ranks that died.
  virtual absl::Status Poll() = 0;
  virtual StepCost last_cost() const = 0;
  // Ends the epoch because rank 0's last answer made no sense; `what` tells why.
  virtual void Reject(const std::string& what) = 0;
  // From any thread: the group is not needed any more. A Send or Receive that waits for a rank fails soon, as
  // does forming.
  virtual void Abandon() = 0;
};

}  // namespace kdt
