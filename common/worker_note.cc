#include "common/worker_note.h"

#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace kdt {
namespace {

constexpr size_t kMaxBytes = 1024;

// Empty for an address that is no socket's.
std::string PathOf(absl::string_view address, absl::string_view suffix = ".lost") {
  return absl::ConsumePrefix(&address, "unix:") ? absl::StrCat(address, suffix) : std::string();
}
constexpr absl::string_view kHangs = ".hangs";

}  // namespace

void WriteLossNote(const std::string& address, absl::string_view why) {
  const std::string path = PathOf(address);
  if (path.empty()) return;
  // Renamed into place, so that nobody reads half of it.
  const std::string unfinished = absl::StrCat(path, ".new");
  {
    std::ofstream file(unfinished);
    file << why.substr(0, kMaxBytes) << '\n';
    if (!file.flush()) return;
  }
  std::error_code error;
  std::filesystem::rename(unfinished, path, error);
}

void RemoveLossNote(const std::string& address) {
  std::error_code error;
  if (const std::string path = PathOf(address); !path.empty()) std::filesystem::remove(path, error);
}

std::string ReadLossNote(const std::string& address) {
  const std::string path = PathOf(address);
  if (path.empty()) return "";
  std::ifstream file(path);
  std::string line(kMaxBytes, '\0');
  file.read(line.data(), static_cast<std::streamsize>(line.size()));
  line.resize(static_cast<size_t>(file.gcount()));
  return line.substr(0, line.find('\n'));
}

bool WriteHangNote(const std::string& address) {
  const std::string path = PathOf(address, kHangs);
  return !path.empty() && std::ofstream(path).is_open();
}

bool TakeHangNote(const std::string& address) {
  std::error_code error;
  const std::string path = PathOf(address, kHangs);
  return !path.empty() && std::filesystem::remove(path, error);
}

}  // namespace kdt
