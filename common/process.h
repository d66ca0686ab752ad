// Child processes: start, watch, signal; and what a program does at its start to be a good one.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kdt {

class ChildProcess {
 public:
  struct Options {
    std::string name;               // for messages: "worker 3"
    std::vector<std::string> argv;  // argv[0] is the program's path
    bool capture_stdout = false;    // read it through stdout_fd(); otherwise inherited
    bool discard_stderr = false;
    std::string stderr_path;  // append standard error to this file; empty: inherited
  };

  // NOT_FOUND when the program does not exist or cannot be executed.
  static absl::StatusOr<ChildProcess> Start(const Options& options);

  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&& other) noexcept;
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  // Kills (SIGKILL) and reaps the process when it still runs. One that does not end within 5 s, since a
  // device hangs in the kernel, is left to whoever inherits it.
  ~ChildProcess();

  const std::string& name() const { return name_; }
  pid_t pid() const { return pid_; }
  int stdout_fd() const { return stdout_fd_; }  // non-blocking; -1: not captured

  // Reaps without waiting; true once the process has ended.
  bool Ended();
  // Waits up to `timeout_ms` for the end.
  bool WaitEnded(int timeout_ms);
  void Signal(int signal);

  // Only after the end: "exited with status 3", "was killed by signal 9 (Killed)".
  std::string EndReason() const;
  // Exit status; empty when it was killed by a signal or still runs.
  std::optional<int> exit_status() const;

  // Reads standard output until a line that begins with `prefix` is complete and returns that line.
  // UNAVAILABLE with the reason when the process ends first, DEADLINE_EXCEEDED after `timeout_ms`.
  absl::StatusOr<std::string> WaitForLine(const std::string& prefix, int timeout_ms);
  // Standard output that nobody has read yet, without waiting for more.
  std::string TakeOutput();

 private:
  ChildProcess() = default;

  std::string name_;
  pid_t pid_ = -1;
  int stdout_fd_ = -1;
  std::string unread_;         // standard output behind the last complete line
  std::optional<int> status_;  // as waitpid gives it
};

// Sent by kdt-launch to the coordinator that it started when the group will not come back: running requests
// are ended at once, with UNAVAILABLE, where SIGTERM lets them finish.
constexpr int kGroupGivenUp = SIGUSR1;
// Sent by kdt-launch to workers whose coordinator it did not start: each ends once no coordinator uses it.
constexpr int kEndWhenUnused = SIGUSR2;

// Has the kernel kill this process when its parent ends. False: the parent has ended already.
bool DieWithParent();

// Blocks the signals in this thread and in those that it starts from now on, so that they come only to who
// waits for the set. Call it before any thread starts. A SIGHUP that is ignored, as under nohup, is left out:
// it would come although nobody wants it.
sigset_t BlockSignals(std::initializer_list<int> signals);

// The folder of the running executable, for finding its siblings.
std::string ExecutableDir();

// A new folder of mode 0700 under the system's temporary folder, for unix sockets. Removed with its files by
// RemoveTree.
absl::StatusOr<std::string> MakeTempDir(const std::string& prefix);
void RemoveTree(const std::string& path);

}  // namespace kdt
