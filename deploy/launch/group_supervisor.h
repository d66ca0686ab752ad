// Starts and watches the processes of one group on this host: tp worker processes and their coordinator,
// talking over unix sockets; or the workers alone, whose coordinator runs elsewhere (another container,
// another host).
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/process.h"
#include "deploy/launch/group_folder.h"

namespace kdt {

enum class Role { kAll, kWorkers };
enum class OnLoss { kExit, kRestart };

struct GroupOptions {
  std::string bin_dir;  // where kdt-worker and kdt-coordinator lie
  Role role = Role::kAll;
  int tp = 1;
  int first_rank = 0;  // ranks first_rank .. first_rank + ranks - 1 run here; all of them with Role::kAll
  int ranks = 1;
  std::string socket_dir;   // of rankR.sock; empty: a new one that is removed at the end
  std::string worker_host;  // not empty: workers listen on TCP, local rank i on worker_port + i
  int worker_port = 0;
  std::vector<int> devices;  // local rank i runs on GPU devices[i % size]; empty: no GPUs
  int metrics_port = -1;     // coordinator P, local rank i P + 1 + i; 0: each takes a free port; -1: none
  int drain_timeout_s = 30;
  OnLoss on_loss = OnLoss::kExit;
  int max_restarts = 5;                  // losses in ten minutes after which the launcher gives up
  std::vector<std::string> worker_args;  // the same for all ranks
  std::vector<std::string> coordinator_args;
};

// Owns the processes. Everything started is ended before Run returns; should the launcher itself be killed,
// the kernel ends its children (they ask for that with --die_with_parent).
class GroupSupervisor {
 public:
  explicit GroupSupervisor(GroupOptions options) : options_(std::move(options)) {}
  ~GroupSupervisor();

  // Blocks until SIGTERM, SIGINT or SIGHUP (drains, returns 0) or a loss that ends the group (returns 1 after
  // logging which process ended and how). Prints "kdt ready listen=HOST:PORT" on standard output once the
  // group serves, or "kdt workers started" when there is no coordinator here to tell. Call it before any
  // thread is started: it blocks these and SIGCHLD for the process.
  int Run();

 private:
  struct Loss {
    bool of_worker = false;
    bool before_it_listened = false;
    std::string reason;  // "worker 3 (pid 71) was killed by signal 9 (Killed)", and what it told
  };

  absl::Status Start();
  absl::Status StartWorkers();
  absl::Status StartCoordinator();
  void ReadCoordinatorOutput();
  // The process whose end came first, as far as that can be told: a worker before the coordinator (which
  // exits when it loses a rank), one killed by a signal before one that exited.
  ChildProcess* FirstEnded();
  Loss Examine(ChildProcess& lost);
  // True when the group goes on (its workers are to be started again at restart_at_).
  bool HandleLoss(ChildProcess& lost);
  bool KillWorkers();   // false: one does not end
  bool RestartIfDue();  // false: it was due and failed
  void KillHungWorkers();
  int PollTimeoutMs() const;
  int Drain();
  // Lets the coordinator, wherever it runs, end the workers once its requests are done. Without one they end
  // by themselves.
  void AwaitWorkers();
  void AwaitCoordinator();
  // Ends the group for good: the coordinator tells its clients so.
  void GiveUp();
  void EndAll(std::chrono::milliseconds grace);
  void EndWorkers(std::chrono::milliseconds grace);
  std::string WorkerAddress(int rank) const;

  GroupOptions options_;
  std::string socket_dir_;
  GroupFolder own_dir_;  // of socket_dir_ when it was made here
  std::vector<ChildProcess> workers_;
  std::optional<ChildProcess> coordinator_;
  std::string coordinator_output_;
  std::string first_loss_;   // reason of the first loss, kept through restarts
  std::vector<pid_t> hung_;  // workers that were killed because they hung
  std::vector<std::chrono::steady_clock::time_point> losses_;
  std::optional<std::chrono::steady_clock::time_point> restart_at_;  // set while no worker runs
};

}  // namespace kdt
