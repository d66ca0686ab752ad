#include "common/process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"

extern char** environ;

namespace kdt {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kKilledMs = 5000;

absl::Status ErrnoStatus(const std::string& what, int error) {
  return absl::InternalError(absl::StrCat(what, ": ", std::strerror(error)));
}

}  // namespace

absl::StatusOr<ChildProcess> ChildProcess::Start(const Options& options) {
  KDT_CHECK(!options.argv.empty());
  int pipe_fds[2] = {-1, -1};
  if (options.capture_stdout && pipe2(pipe_fds, O_CLOEXEC) != 0) return ErrnoStatus("pipe2", errno);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  if (options.capture_stdout) posix_spawn_file_actions_adddup2(&actions, pipe_fds[1], STDOUT_FILENO);
  if (options.discard_stderr) {
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  } else if (!options.stderr_path.empty()) {
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, options.stderr_path.c_str(),
                                     O_WRONLY | O_CREAT | O_APPEND, 0600);
  }

  // The child starts with no blocked signals and default handlers, whatever this process has set for itself.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none, all;
  sigemptyset(&none);
  sigfillset(&all);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &all);
  // In a process group of its own, so that Ctrl-C in a terminal reaches the parent alone, which then ends its
  // children.
  posix_spawnattr_setpgroup(&attributes, 0);
  posix_spawnattr_setflags(&attributes,
                           POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);

  std::vector<char*> argv;
  for (const std::string& arg : options.argv) argv.push_back(const_cast<char*>(arg.c_str()));
  argv.push_back(nullptr);

  ChildProcess child;
  child.name_ = options.name;
  const int error = posix_spawn(&child.pid_, argv[0], &actions, &attributes, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (pipe_fds[1] >= 0) close(pipe_fds[1]);
  if (error != 0) {
    if (pipe_fds[0] >= 0) close(pipe_fds[0]);
    child.pid_ = -1;
    return absl::NotFoundError(
        absl::StrCat("cannot start ", options.name, " (", options.argv[0], "): ", std::strerror(error)));
  }
  if (options.capture_stdout) {
    child.stdout_fd_ = pipe_fds[0];
    fcntl(child.stdout_fd_, F_SETFL, O_NONBLOCK);
  }
  return child;
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept { *this = std::move(other); }

ChildProcess& ChildProcess::operator=(ChildProcess&& other) noexcept {
  std::swap(name_, other.name_);
  std::swap(pid_, other.pid_);
  std::swap(stdout_fd_, other.stdout_fd_);
  std::swap(unread_, other.unread_);
  std::swap(status_, other.status_);
  return *this;
}

ChildProcess::~ChildProcess() {
  if (pid_ > 0 && !Ended()) {
    Signal(SIGKILL);
    WaitEnded(kKilledMs);
  }
  if (stdout_fd_ >= 0) close(stdout_fd_);
}

bool ChildProcess::Ended() {
  if (status_.has_value() || pid_ <= 0) return true;
  int status = 0;
  const pid_t got = waitpid(pid_, &status, WNOHANG);
  if (got == pid_) status_ = status;
  return status_.has_value();
}

bool ChildProcess::WaitEnded(int timeout_ms) {
  const auto deadline = Clock::now() + std::chrono::milliseconds(timeout_ms);
  while (!Ended()) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

void ChildProcess::Signal(int signal) {
  if (pid_ > 0 && !status_.has_value()) kill(pid_, signal);
}

std::string ChildProcess::EndReason() const {
  if (!status_.has_value()) return "still runs";
  if (WIFSIGNALED(*status_)) {
    return absl::StrCat("was killed by signal ", WTERMSIG(*status_), " (", strsignal(WTERMSIG(*status_)),
                        ")");
  }
  return absl::StrCat("exited with status ", WEXITSTATUS(*status_));
}

std::optional<int> ChildProcess::exit_status() const {
  if (!status_.has_value() || !WIFEXITED(*status_)) return std::nullopt;
  return WEXITSTATUS(*status_);
}

absl::StatusOr<std::string> ChildProcess::WaitForLine(const std::string& prefix, int timeout_ms) {
  KDT_CHECK(stdout_fd_ >= 0);
  const auto deadline = Clock::now() + std::chrono::milliseconds(timeout_ms);
  while (true) {
    for (size_t end = unread_.find('\n'); end != std::string::npos; end = unread_.find('\n')) {
      const std::string line = unread_.substr(0, end);
      unread_.erase(0, end + 1);
      if (line.compare(0, prefix.size(), prefix) == 0) return line;
    }
    if (Clock::now() >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat(name_, " printed no line \"", prefix, "...\" within ", timeout_ms, " ms"));
    }
    pollfd poll_fd{stdout_fd_, POLLIN, 0};
    poll(&poll_fd, 1, 50);
    char buffer[4096];
    const ssize_t got = read(stdout_fd_, buffer, sizeof(buffer));
    if (got > 0) {
      unread_.append(buffer, static_cast<size_t>(got));
    } else if (got == 0 && WaitEnded(1000)) {
      return absl::UnavailableError(absl::StrCat(name_, " ", EndReason()));
    }
  }
}

std::string ChildProcess::TakeOutput() {
  KDT_CHECK(stdout_fd_ >= 0);
  char buffer[4096];
  for (ssize_t got; (got = read(stdout_fd_, buffer, sizeof(buffer))) > 0;) {
    unread_.append(buffer, static_cast<size_t>(got));
  }
  return std::exchange(unread_, {});
}

bool DieWithParent() {
  const pid_t parent = getppid();
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  return getppid() == parent;  // else it ended before the request was in place
}

sigset_t BlockSignals(std::initializer_list<int> signals) {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : signals) {
    struct sigaction inherited;
    const bool ignored = sigaction(signal, nullptr, &inherited) == 0 && inherited.sa_handler == SIG_IGN;
    if (signal != SIGHUP || !ignored) sigaddset(&set, signal);
  }
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  return set;
}

std::string ExecutableDir() {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  return error ? std::string(".") : self.parent_path().string();
}

absl::StatusOr<std::string> MakeTempDir(const std::string& prefix) {
  std::error_code error;
  std::filesystem::path base = std::filesystem::temp_directory_path(error);
  if (error) return absl::InternalError(absl::StrCat("temporary folder: ", error.message()));
  std::string name = (base / (prefix + "XXXXXX")).string();
  if (mkdtemp(name.data()) == nullptr) return ErrnoStatus(absl::StrCat("mkdtemp ", name), errno);
  return name;
}

void RemoveTree(const std::string& path) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
}

}  // namespace kdt
