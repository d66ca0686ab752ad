#include "worker/collective/shm_leftovers.h"

#include <dirent.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <ctime>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace kdt {
namespace {

constexpr time_t kYoungSeconds = 10;

bool IsLeftover(int fd) {
  struct stat info {};
  if (fstat(fd, &info) != 0 || info.st_uid != geteuid()) return false;
  if (time(nullptr) - info.st_mtime < kYoungSeconds) return false;
  struct flock lock = ShmRankLock(0, kMaxShmRanks);
  return fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

}  // namespace

struct flock ShmRankLock(int rank, int count) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = count;
  return lock;
}

void RemoveShmLeftovers() {
  DIR* folder = opendir("/dev/shm");
  if (folder == nullptr) return;
  std::vector<std::string> names;
  while (const dirent* entry = readdir(folder)) {
    if (std::string(entry->d_name).starts_with(kShmPrefix)) names.push_back(absl::StrCat("/", entry->d_name));
  }
  closedir(folder);
  for (const std::string& name : names) {
    const int fd = shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0);
    if (fd < 0) continue;
    if (IsLeftover(fd)) shm_unlink(name.c_str());
    close(fd);
  }
}

}  // namespace kdt
