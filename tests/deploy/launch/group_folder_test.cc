#include "deploy/launch/group_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include "common/process.h"
#include "tests/support/catch.h"

namespace kdt::testing {
namespace {

namespace fs = std::filesystem;

struct TemporaryFolder {
  TemporaryFolder() : path(*MakeTempDir("kdt-test-")) { setenv("TMPDIR", path.c_str(), 1); }
  ~TemporaryFolder() {
    unsetenv("TMPDIR");
    RemoveTree(path);
  }
  // A group's folder with a socket's file, and a lock that nobody holds unless a test does.
  std::string Leave(const std::string& name, bool with_lock = true) const {
    fs::create_directory(path + "/" + name);
    std::ofstream(path + "/" + name + "/rank0.sock") << "x";
    if (with_lock) std::ofstream(path + "/" + name + "/lock") << "";
    return path + "/" + name;
  }
  const std::string path;
};

}  // namespace

TEST_CASE("a group's folder is its user's alone and goes with its owner") {
  const TemporaryFolder temporary;
  std::optional<GroupFolder> folder(*GroupFolder::Make());
  const std::string path = folder->path();
  CHECK(path.rfind(temporary.path + "/kdt-group-", 0) == 0);
  struct stat info {};
  REQUIRE(stat(path.c_str(), &info) == 0);
  CHECK((info.st_mode & 0777) == 0700);
  {
    const GroupFolder other = *GroupFolder::Make();
    CHECK(fs::exists(path));  // its owner lives
    CHECK(other.path() != path);
  }
  folder.reset();
  CHECK(fs::is_empty(temporary.path));
}

TEST_CASE("folders of dead launchers are removed, and nothing else") {
  const TemporaryFolder temporary;
  const std::string left = temporary.Leave("kdt-group-left");
  const std::string being_made = temporary.Leave("kdt-group-new", /*with_lock=*/false);
  const std::string other = temporary.Leave("kdt-test-other");
  fs::create_directory_symlink(other, temporary.path + "/kdt-group-link");
  const std::string held = temporary.Leave("kdt-group-held");
  const int fd = open((held + "/lock").c_str(), O_RDWR | O_CLOEXEC);
  REQUIRE(flock(fd, LOCK_EX) == 0);
  {
    const GroupFolder folder = *GroupFolder::Make();
    CHECK_FALSE(fs::exists(left));
    CHECK(fs::exists(being_made + "/rank0.sock"));
    CHECK(fs::exists(other + "/rank0.sock"));
    CHECK(fs::is_symlink(temporary.path + "/kdt-group-link"));
    CHECK(fs::exists(held + "/rank0.sock"));
  }
  close(fd);
  const GroupFolder folder = *GroupFolder::Make();
  CHECK_FALSE(fs::exists(held));
}

}  // namespace kdt::testing
