#include "tests/worker/support/checkpoint_copy.h"

#include <unistd.h>

#include <atomic>
#include <fstream>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace kdt::testing {

namespace fs = std::filesystem;

CheckpointCopy::CheckpointCopy() {
  static std::atomic<int> counter = 0;
  root_ = fs::temp_directory_path() / absl::StrCat("kdt-checkpoint-", getpid(), "-", ++counter);
  fs::create_directories(root_);
  fs::copy(fs::path(KDT_GOLDENS_DIR) / "model", root_ / "model");
  fs::copy(fs::path(KDT_GOLDENS_DIR) / "drafter", root_ / "drafter");
}

CheckpointCopy::~CheckpointCopy() {
  std::error_code ignored;
  fs::remove_all(root_, ignored);
}

void CheckpointCopy::Replace(const std::string& file, const std::string& from, const std::string& to) {
  std::ifstream in(file, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(in)), {});
  const size_t at = text.find(from);
  if (at == std::string::npos) throw std::runtime_error(absl::StrCat(file, " does not hold ", from));
  text.replace(at, from.size(), to);
  std::ofstream(file, std::ios::binary) << text;
}

void CheckpointCopy::SetBf16(const std::string& safetensors, const std::string& tensor, int64_t index,
                             uint16_t bits) {
  std::fstream file(safetensors, std::ios::binary | std::ios::in | std::ios::out);
  uint64_t header_bytes = 0;
  file.read(reinterpret_cast<char*>(&header_bytes), sizeof(header_bytes));
  std::string header(header_bytes, '\0');
  file.read(header.data(), static_cast<std::streamsize>(header_bytes));
  const int64_t begin = nlohmann::json::parse(header).at(tensor).at("data_offsets")[0];
  file.seekp(static_cast<std::streamoff>(sizeof(header_bytes) + header_bytes + begin + index * 2));
  file.write(reinterpret_cast<const char*>(&bits), sizeof(bits));
}

}  // namespace kdt::testing
