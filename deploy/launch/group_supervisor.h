// Starts and watches one local group: tp worker processes and their coordinator, talking over unix sockets.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/process.h"

namespace kdt {

enum class OnLoss { kExit, kRestart };

struct GroupOptions {
  std::string bin_dir;  // where kdt-worker and kdt-coordinator lie
  int tp = 1;
  int metrics_port = -1;  // coordinator P, rank r P + 1 + r; 0: each takes a free port; -1: none
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

  // Blocks until SIGTERM or SIGINT (drains, returns 0) or a loss that ends the group (returns 1 after logging
  // which process ended and how). Prints "kdt ready listen=HOST:PORT" on standard output once the group
  // serves. Call it before any thread is started: it blocks SIGTERM, SIGINT and SIGCHLD for the process.
  int Run();

 private:
  absl::Status Start();
  absl::Status StartWorkers();
  absl::Status StartCoordinator();
  void ReadCoordinatorOutput();
  // The process whose end came first, as far as that can be told: a worker before the coordinator (which
  // exits when it loses a rank), one killed by a signal before one that exited.
  ChildProcess* FirstEnded();
  // True when the group goes on (its workers are being restarted).
  bool HandleLoss(const ChildProcess& lost);
  int Drain();
  void EndAll(std::chrono::milliseconds grace);
  std::string WorkerAddress(int rank) const;

  GroupOptions options_;
  std::string socket_dir_;
  std::vector<ChildProcess> workers_;
  std::optional<ChildProcess> coordinator_;
  std::string coordinator_output_;
  std::string first_loss_;  // reason of the first loss, kept through restarts
  std::vector<std::chrono::steady_clock::time_point> losses_;
};

}  // namespace kdt
