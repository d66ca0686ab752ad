// The folder of a local group's sockets, removed with its owner or by the next launcher.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace kdt {

// A folder of mode 0700 under the system's temporary folder. A launcher that is killed leaves it behind; its
// lock is free then, by which the next launcher knows.
class GroupFolder {
 public:
  // Removes what dead launchers of this user have left, and makes a new one.
  static absl::StatusOr<GroupFolder> Make();
  GroupFolder() = default;  // none
  GroupFolder(GroupFolder&& other) noexcept { *this = std::move(other); }
  GroupFolder& operator=(GroupFolder&& other) noexcept;
  ~GroupFolder();  // removes it with its files

  const std::string& path() const { return path_; }  // empty: none

 private:
  std::string path_;
  int lock_fd_ = -1;
};

}  // namespace kdt
