// A copy of the reference checkpoints that a test may damage; removed with the object.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace kdt::testing {

class CheckpointCopy {
 public:
  CheckpointCopy();
  ~CheckpointCopy();
  CheckpointCopy(const CheckpointCopy&) = delete;
  CheckpointCopy& operator=(const CheckpointCopy&) = delete;

  std::string model() const { return root_ / "model"; }
  std::string drafter() const { return root_ / "drafter"; }

  // Replaces the first `from` in a file by `to`, which has the same length in a safetensors header.
  static void Replace(const std::string& file, const std::string& from, const std::string& to);
  // Overwrites value `index` of a bf16 tensor.
  static void SetBf16(const std::string& safetensors, const std::string& tensor, int64_t index,
                      uint16_t bits);

 private:
  std::filesystem::path root_;
};

}  // namespace kdt::testing
