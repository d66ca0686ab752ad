#include "deploy/launch/group_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/process.h"
#include "common/status.h"

namespace kdt {
namespace {

constexpr char kPrefix[] = "kdt-group-";
constexpr char kLock[] = "/lock";

bool IsOwnFolder(const std::string& path) {
  struct stat info {};
  return lstat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode) && info.st_uid == geteuid();
}

// The lock of a live launcher is held. A folder without one is just being made.
void RemoveIfLeft(const std::string& path) {
  const int fd = open(absl::StrCat(path, kLock).c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) return;
  if (flock(fd, LOCK_EX | LOCK_NB) == 0) {
    RemoveTree(path);
    spdlog::info("removed {}, left by a launcher that was killed", path);
  }
  close(fd);
}

}  // namespace

absl::StatusOr<GroupFolder> GroupFolder::Make() {
  std::error_code error;
  const std::filesystem::path base = std::filesystem::temp_directory_path(error);
  for (std::filesystem::directory_iterator entry(base, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string path = entry->path().string();
    if (absl::StartsWith(entry->path().filename().string(), kPrefix) && IsOwnFolder(path)) RemoveIfLeft(path);
  }
  while (true) {
    GroupFolder folder;
    KDT_ASSIGN_OR_RETURN(folder.path_, MakeTempDir(kPrefix));
    const std::string lock = absl::StrCat(folder.path_, kLock);
    folder.lock_fd_ = open(lock.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    struct stat info {};
    if (folder.lock_fd_ < 0 || flock(folder.lock_fd_, LOCK_EX) != 0 || fstat(folder.lock_fd_, &info) != 0) {
      return absl::InternalError(absl::StrCat(lock, ": cannot be locked: ", std::strerror(errno)));
    }
    // Another launcher may have come between the two steps, and taken it for one that was left.
    if (info.st_nlink > 0) return folder;
  }
}

GroupFolder& GroupFolder::operator=(GroupFolder&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(lock_fd_, other.lock_fd_);
  return *this;
}

GroupFolder::~GroupFolder() {
  if (!path_.empty()) RemoveTree(path_);
  if (lock_fd_ >= 0) close(lock_fd_);
}

}  // namespace kdt
