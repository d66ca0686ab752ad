// The parts of kdt-coordinator put together, from the first connection to the last answer.
#pragma once

#include <signal.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/address.h"
#include "common/metrics.h"
#include "coordinator/api/server.h"
#include "coordinator/group/rank_group.h"
#include "coordinator/scheduler/scheduler.h"
#include "coordinator/scheduler/tree_recorder.h"

namespace kdt {

struct CoordinatorOptions {
  std::string model;  // folder
  Address listen;
  ApiSecurity security;
  RankGroupOptions group;      // on_change is the coordinator's own
  SchedulerOptions scheduler;  // what depends on the model, and the callbacks, are filled in
  std::string metrics_host;
  int metrics_port = -1;     // -1: none
  std::string record_trees;  // file; empty: none
  size_t record_trees_count = 0;
  bool expects_drafter = false;
  std::vector<std::string> speculation_flags;  // names of those that are set and do nothing without a drafter
  std::chrono::seconds drain_timeout{30};
};

class Coordinator {
 public:
  static constexpr int kExitGroupLost = 3;

  // Reads the model and binds the ports. `signals` are blocked; Run waits for them.
  static absl::StatusOr<std::unique_ptr<Coordinator>> Create(CoordinatorOptions options,
                                                             const sigset_t& signals);
  ~Coordinator();

  // Serves until a signal comes or the group is lost; prints "kdt-coordinator ready listen=HOST:PORT" once it
  // serves. Returns the exit status. INVALID_ARGUMENT when a flag does not fit what the ranks have loaded.
  absl::StatusOr<int> Run();

 private:
  // What signals ask for.
  struct Stop {
    bool wanted = false;
    bool given_up = false;      // kdt-launch will not start the ranks again: requests are not waited for
    bool leaves_ranks = false;  // another coordinator is to join them
  };

  explicit Coordinator(CoordinatorOptions options) : options_(std::move(options)) {}
  absl::Status Start(const sigset_t& signals);
  absl::Status StartScheduler(std::shared_ptr<const ServedModel> model);
  void WakeRun();
  void TakeSignals();
  absl::Status ServeUntilStop();
  absl::Status CheckSpeculation(const GroupLimits& limits) const;
  void Announce() const;
  // Lets running requests finish, until the time has passed. False: nobody can serve them any more.
  bool DrainRequests();

  CoordinatorOptions options_;
  int signal_fd_ = -1;
  int wake_fds_[2] = {-1, -1};  // a pipe: something else than a signal has come
  Stop stop_;
  std::atomic<bool> group_lost_{false};
  std::unique_ptr<RankGroup> group_;
  std::unique_ptr<TreeRecorder> recorder_;
  std::unique_ptr<MetricsServer> metrics_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<ApiServer> server_;
};

}  // namespace kdt
